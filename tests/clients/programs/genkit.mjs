// Genkit's loop with one tool: node genkit.mjs MODE URL KEY MODEL PROMPT; STREAMED=1 streams.
import { handbook, load } from "./load.mjs";

const [mode, url, apiKey, model, prompt] = process.argv.slice(2);
const { genkit, z } = await load("genkit");
const { googleAI } = await load("@genkit-ai/google-genai");
const { openAICompatible } = await load("@genkit-ai/compat-oai");

const name = mode === "gemini" ? googleAI.model(model) : `holdfast/${model}`;
const plugin =
  mode === "gemini"
    ? googleAI({ apiKey, baseUrl: url })
    : openAICompatible({ name: "holdfast", apiKey, baseURL: `${url}/v1` });
const ai = genkit({ plugins: [plugin] });
const about = { name: "look", description: "Look at a place.", outputSchema: z.string() };
const look = ai.defineTool(
  { ...about, inputSchema: z.object({ where: z.string() }) },
  async ({ where }) => `a cat, ${where}`,
);
const asked = { model: name, system: handbook, prompt, tools: [look], maxTurns: 8 };
const isStreamed = process.env.STREAMED === "1";
console.log((await (isStreamed ? ai.generateStream(asked).response : ai.generate(asked))).text);
process.exit(0); // its telemetry would keep the process
