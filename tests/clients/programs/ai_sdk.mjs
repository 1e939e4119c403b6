// The AI SDK's loop with one tool: node ai_sdk.mjs MODE URL KEY MODEL PROMPT.
import { handbook, load } from "./load.mjs";

const [mode, url, apiKey, name, prompt] = process.argv.slice(2);
const { generateText, streamText, stepCountIs, tool } = await load("ai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");

const given = { baseURL: `${url}/v1`, apiKey };
const models = {
  anthropic: () => createAnthropic(given)(name),
  "openai-chat": () => createOpenAI(given).chat(name),
  openai: () => createOpenAI(given)(name),
};
const kept = { anthropic: { cacheControl: { type: "ephemeral" } } };
const asked = {
  model: models[mode](),
  system: handbook,
  prompt,
  providerOptions: kept,
  stopWhen: stepCountIs(8),
  tools: {
    look: tool({
      description: "Look at a place.",
      inputSchema: z.object({ where: z.string() }),
      execute: async ({ where }) => `a cat, ${where}`,
    }),
  },
};
const isStreamed = process.env.STREAMED === "1";
console.log(isStreamed ? await streamText(asked).text : (await generateText(asked)).text);
