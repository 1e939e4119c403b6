// Google's SDK, a chat with one tool: node google_genai.mjs MODE URL KEY MODEL PROMPT; STREAMED=1 streams.
import { handbook, load } from "./load.mjs";

const [, url, apiKey, model, prompt] = process.argv.slice(2);
const { GoogleGenAI, Type } = await load("@google/genai");

const where = { type: Type.OBJECT, properties: { where: { type: Type.STRING } }, required: ["where"] };
const look = { name: "look", description: "Look at a place.", parameters: where };
const config = { systemInstruction: handbook, tools: [{ functionDeclarations: [look] }] };
const chat = new GoogleGenAI({ apiKey, httpOptions: { baseUrl: url } }).chats.create({ model, config });

async function say(message) {
  if (process.env.STREAMED !== "1") return [await chat.sendMessage({ message })];
  return Array.fromAsync(await chat.sendMessageStream({ message }));
}

let message = prompt;
for (;;) {
  const answers = await say(message);
  const calls = answers.flatMap((answer) => answer.functionCalls ?? []);
  if (calls.length === 0) {
    console.log(answers.map((answer) => answer.text ?? "").join(""));
    break;
  }
  message = calls.map(({ id, name, args }) => ({
    functionResponse: { id, name, response: { output: `a cat, ${args.where}` } },
  }));
}
