// OpenAI's Agents SDK with one tool: node openai_agents.mjs MODE URL KEY MODEL PROMPT.
import { handbook, load } from "./load.mjs";

const [mode, url, apiKey, model, prompt] = process.argv.slice(2);
const agents = await load("@openai/agents");
const { default: OpenAI } = await load("openai");
const { z } = await load("zod");

agents.setDefaultOpenAIClient(new OpenAI({ baseURL: `${url}/v1`, apiKey }));
agents.setOpenAIAPI(mode === "openai-chat" ? "chat_completions" : "responses");
agents.setTracingDisabled(true);
const look = agents.tool({
  name: "look",
  description: "Look at a place.",
  parameters: z.object({ where: z.string() }),
  execute: async ({ where }) => `a cat, ${where}`,
});
const agent = new agents.Agent({ name: "Looker", instructions: handbook, model, tools: [look] });
console.log((await agents.run(agent, prompt)).finalOutput);
