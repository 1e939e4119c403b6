// Every kind of answer, whole and streamed, through the AI SDK (which checks each answer and event
// against its zod schemas) and both official SDKs. Prints one JSON line for each case.
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
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

// What an SDK has parsed goes back as it is: its own objects, with all of their fields.
const Place = z.object({ city: z.enum(["Oslo", "Bern"]) });
const lookUp = { name: "look_up", parameters: Place };
const ask = { role: "user", content: "What is a lease?" };
for (const way of ["parse", "stream"]) {
  cases[`openai sdk chat ${way} sent back`] = async () => {
    const asked = { model, max_tokens: 200, tools: [zodFunction(lookUp)] };
    const first = { ...asked, messages: [ask], tool_choice: "required" };
    const completions = chat.chat.completions;
    const answer = way === "parse"
      ? await completions.parse(first)
      : await completions.stream(first).finalChatCompletion();
    const said = answer.choices[0].message;
    if (!said.tool_calls[0].function.parsed_arguments) throw new Error("nothing was parsed");
    const results = said.tool_calls.map((call) => ({
      role: "tool", tool_call_id: call.id, content: "Rain.",
    }));
    const form = { response_format: zodResponseFormat(Place, "place") };
    const { tools, ...plain } = asked;
    const second = await completions.parse({ ...plain, ...form, messages: [ask] });
    if (!second.choices[0].message.parsed) throw new Error("nothing was parsed");
    const whole = [ask, said, ...results, second.choices[0].message, ask];
    return (await completions.create({ ...asked, messages: whole })).usage;
  };
  cases[`openai sdk responses ${way} sent back`] = async () => {
    const asked = { model, store: false, max_output_tokens: 200, tools: [zodResponsesFunction(lookUp)] };
    const first = { ...asked, input: [ask], tool_choice: "required" };
    const answer = way === "parse"
      ? await chat.responses.parse(first)
      : await chat.responses.stream(first).finalResponse();
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls[0].parsed_arguments) throw new Error("nothing was parsed");
    const outputs = calls.map((call) => ({
      type: "function_call_output", call_id: call.call_id, output: "Rain.",
    }));
    const form = { text: { format: zodTextFormat(Place, "place") } };
    const { tools, ...plain } = asked;
    const second = await chat.responses.parse({ ...plain, ...form, input: [ask] });
    if (!second.output_parsed) throw new Error("nothing was parsed");
    const input = [ask, ...answer.output, ...outputs, ...second.output, ask];
    return (await chat.responses.create({ ...asked, input })).usage;
  };
  cases[`anthropic sdk ${way} sent back`] = async () => {
    const asked = { ...body, max_tokens: 200 };
    const first = { ...asked, output_config: { format: zodOutputFormat(Place) } };
    const answer = way === "parse"
      ? await sdk.messages.parse(first)
      : await sdk.messages.stream(first).finalMessage();
    if (!answer.parsed_output) throw new Error("nothing was parsed");
    const said = { role: "assistant", content: answer.content };
    return (await sdk.messages.create({ ...asked, messages: [...messages, said, ask] })).usage;
  };
}

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
