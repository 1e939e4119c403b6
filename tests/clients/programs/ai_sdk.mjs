// The AI SDK's loop with one tool: node ai_sdk.mjs MODE URL KEY MODEL PROMPT.
// With MISHAPS it goes on after a run that ended early, and begins anew once (`/clear`).
import { readFileSync } from "node:fs";
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
const kept = {
  anthropic: { cacheControl: { type: "ephemeral" } },
  // Else it names its own texts of a Responses API by their ids.
  openai: { store: process.env.STORE !== "0" },
};
const asked = {
  model: models[mode](),
  system: handbook,
  providerOptions: kept,
  stopWhen: stepCountIs(8),
  tools: {
    look: tool({
      description: "Look at a place.",
      inputSchema: z.object({ where: z.string() }),
      execute: async ({ where }) => {
        if (where === "nowhere") throw new Error("there is no such place");
        if (where !== "picture") return `a cat, ${where}`;
        return { data: readFileSync(process.env.PICTURE).toString("base64") };
      },
      toModelOutput: ({ output }) =>
        typeof output === "string"
          ? { type: "text", value: output }
          : {
              type: "content",
              value: [
                {
                  type: "file",
                  mediaType: "image/png",
                  data: { type: "data", data: output.data },
                },
              ],
            },
    }),
  },
};
const isStreamed = process.env.STREAMED === "1";

// Results for the calls that have none: the SDK does not go on behind a call that was cut.
function missingResults(messages) {
  const parts = messages.flatMap(({ content }) => (Array.isArray(content) ? content : []));
  const answered = new Set(
    parts.filter(({ type }) => type === "tool-result").map(({ toolCallId }) => toolCallId),
  );
  const results = parts
    .filter(({ type, toolCallId }) => type === "tool-call" && !answered.has(toolCallId))
    .map(({ toolCallId, toolName }) => ({
      type: "tool-result",
      toolCallId,
      toolName,
      output: { type: "error-text", value: "the call was cut off" },
    }));
  return results.length === 0 ? [] : [{ role: "tool", content: results }];
}

// What a run says, and the conversation after it.
async function run(messages) {
  const result = isStreamed
    ? streamText({ ...asked, messages })
    : await generateText({ ...asked, messages });
  const text = await result.text;
  const after = [...messages, ...(await result.responseMessages)];
  return [text, [...after, ...missingResults(after)]];
}

const user = { role: "user", content: prompt };
let messages = [];
let ended = 0;
for (let runs = 0; runs < (process.env.MISHAPS ? 12 : 1) && ended < 3; runs += 1) {
  const [text, after] = await run([...messages, user]);
  console.log(text);
  messages = after;
  ended += text === "All is done." ? 1 : 0;
  if (ended === 2) messages = [];
}
