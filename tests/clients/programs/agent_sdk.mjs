// Claude Agent SDK: node agent_sdk.mjs PROMPT. The address and the key are in the environment.
import { load } from "./load.mjs";

const { query } = await load("@anthropic-ai/claude-agent-sdk");
const options = { permissionMode: "bypassPermissions", allowDangerouslySkipPermissions: true };
for await (const message of query({ prompt: process.argv[2], options })) {
  if (message.type === "result") console.log(message.result);
}
