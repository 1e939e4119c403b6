// Every kind of answer, whole and streamed, through the AI SDK (which checks each answer and event
// against its zod schemas) and both official SDKs. Prints one JSON line for each case.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText, tool } from "ai";
import { z } from "zod";

const [url, key] = process.argv.slice(2);
const model = "holdfast-demo";
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: key });
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const weather = tool({
  description: "Get the current weather in a city.",
  inputSchema: z.object({ city: z.enum(["Oslo", "Bern"]) }),
});
const sdk = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const chat = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const system = "You answer. ".repeat(600);
const marked = { anthropic: { cacheControl: { type: "ephemeral" } } };
const messages = [{ role: "user", content: "What is a lease?" }];
const instructions = { role: "system", content: system, providerOptions: marked };

// What the AI SDK warns of or a stream's error would otherwise be passed over.
async function drained(result) {
  const kinds = new Set();
  for await (const part of result.fullStream) {
    if (part.type === "error") throw part.error;
    kinds.add(part.type);
  }
  return { kinds: [...kinds], usage: await result.usage };
}

const given = { maxOutputTokens: 40, maxRetries: 0, messages };
const called = { ...given, tools: { weather }, toolChoice: "required", maxOutputTokens: 200 };
const cases = {};
for (const [name, of] of [["anthropic", anthropic(model)], ["chat", openai.chat(model)]]) {
  cases[`ai ${name} text`] = async () => (await generateText({ model: of, ...given })).usage;
  cases[`ai ${name} stream`] = () => drained(streamText({ model: of, ...given }));
  cases[`ai ${name} call`] = async () => {
    const { toolCalls } = await generateText({ model: of, ...called });
    if (!["Oslo", "Bern"].includes(toolCalls[0]?.input.city)) throw new Error("no call");
    return toolCalls.length;
  };
  cases[`ai ${name} call stream`] = () => drained(streamText({ model: of, ...called }));
}
cases["ai anthropic cached"] = async () => {
  const asked = { model: anthropic(model), ...given, instructions };
  await generateText(asked);
  const { usage } = await generateText(asked);
  if (!(usage.inputTokenDetails?.cacheReadTokens > 1000)) throw new Error(JSON.stringify(usage));
  return usage;
};
const body = { model, max_tokens: 40, messages };
const sdkTool = {
  name: "weather",
  input_schema: { type: "object", properties: { city: { enum: ["Oslo"] } }, required: ["city"] },
};
cases["anthropic sdk create"] = async () => (await sdk.messages.create(body)).usage;
cases["anthropic sdk stream"] = async () =>
  (await sdk.messages.stream({ ...body, tools: [sdkTool], tool_choice: { type: "any" } }).finalMessage())
    .content.length;
cases["anthropic sdk tool runner"] = async () => {
  const runner = sdk.beta.messages.toolRunner({
    ...body,
    max_tokens: 200,
    max_iterations: 2,
    tools: [{ ...sdkTool, run: () => "Rain.", parse: (input) => input }],
  });
  return (await runner).content.length;
};
cases["openai sdk create"] = async () => (await chat.chat.completions.create(body)).usage;
cases["openai sdk stream"] = async () =>
  (await chat.chat.completions.stream({ ...body, stream_options: { include_usage: true } })
    .finalChatCompletion()).usage;

let failed = 0;
for (const [name, run] of Object.entries(cases)) {
  try {
    console.log(JSON.stringify({ name, ok: true, found: await run() }));
  } catch (error) {
    failed += 1;
    const why = [error?.message, error?.cause?.message, error?.responseBody].filter(Boolean);
    console.log(JSON.stringify({ name, ok: false, why: why.join(" | ").slice(0, 1500) }));
  }
}
process.exit(failed ? 1 : 0);
