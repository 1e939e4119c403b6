// LangChain's agent in JavaScript with one tool: node langchain_js.mjs MODE URL KEY MODEL PROMPT.
import { handbook, load } from "./load.mjs";

const [mode, url, apiKey, model, prompt] = process.argv.slice(2);
const { anthropicPromptCachingMiddleware, createAgent, tool } = await load("langchain");
const { ChatAnthropic } = await load("@langchain/anthropic");
const { ChatOpenAI } = await load("@langchain/openai");
const { z } = await load("zod");

const configuration = { baseURL: `${url}/v1` };
const models = {
  anthropic: () => new ChatAnthropic({ model, apiKey, anthropicApiUrl: url, maxTokens: 500 }),
  "openai-chat": () => new ChatOpenAI({ model, apiKey, configuration }),
  openai: () => new ChatOpenAI({ model, apiKey, configuration, useResponsesApi: true }),
};
const look = tool(async ({ where }) => `a cat, ${where}`, {
  name: "look",
  description: "Look at a place.",
  schema: z.object({ where: z.string() }),
});
const kept = anthropicPromptCachingMiddleware({ minMessagesToCache: 1 });
const middleware = mode === "anthropic" ? [kept] : [];
const agent = createAgent({ model: models[mode](), tools: [look], systemPrompt: handbook, middleware });
const { messages } = await agent.invoke({ messages: [{ role: "user", content: prompt }] });
console.log(messages.at(-1).text);
