// The Responses API through the JavaScript SDKs: OpenAI's own, and the AI SDK, whose schemas are strict.
// Prints one JSON object of what each client made of the answers.
import OpenAI from "openai";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, apiKey] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const model = "scripted";
const look = {
  type: "function",
  name: "look",
  description: "Looks.",
  strict: false,
  parameters: { type: "object", properties: { where: { type: "string" } } },
};
const said = {};

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const first = await client.responses.create({ model, input: "Where?", tools: [look] });
const call = first.output.find((item) => item.type === "function_call");
said.call = JSON.parse(call.arguments);
const stream = client.responses.stream({
  model,
  tools: [look],
  input: [
    { role: "user", content: "Where?" },
    ...first.output,
    { type: "function_call_output", call_id: call.call_id, output: "a cat" },
  ],
});
const types = [];
for await (const event of stream) types.push(event.type);
said.events = [types[0], types.at(-1)];
said.text = (await stream.finalResponse()).output_text;

const provider = createOpenAI({ baseURL, apiKey });
const tools = {
  look: tool({
    description: "Looks.",
    inputSchema: z.object({ where: z.string().optional() }),
    execute: async () => "a cat",
  }),
};
const asked = { model: provider.responses(model), tools, prompt: "Where?", stopWhen: stepCountIs(4) };
const whole = await generateText(asked);
said.generated = { text: whole.text, steps: whole.steps.length };
const streamed = streamText({ ...asked, onError: ({ error }) => { said.error = String(error); } });
said.streamed = { text: await streamed.text, steps: (await streamed.steps).length };
console.log(JSON.stringify(said));
