// Mastra's agent with one tool: node mastra.mjs MODE URL KEY MODEL PROMPT. With a `url` it speaks Chat Completions.
import { handbook, load } from "./load.mjs";

const [, url, apiKey, model, prompt] = process.argv.slice(2);
const { Agent } = await load("@mastra/core/agent");
const { createTool } = await load("@mastra/core/tools");
const { z } = await load("zod");

const look = createTool({
  id: "look",
  description: "Look at a place.",
  inputSchema: z.object({ where: z.string() }),
  execute: async ({ where }) => `a cat, ${where}`,
});
const agent = new Agent({
  id: "looker",
  name: "Looker",
  instructions: handbook,
  model: { id: `holdfast/${model}`, url: `${url}/v1`, apiKey },
  tools: { look },
});
console.log((await agent.generate(prompt, { maxSteps: 8 })).text);
process.exit(0); // its timers would keep the process
