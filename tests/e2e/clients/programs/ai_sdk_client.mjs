// npm: "ai@7.0.173" "@ai-sdk/openai-compatible@3.0.92" "@ai-sdk/openai@4.0.118" "zod@4.1.12"
// Vercel's AI SDK: a conversation with tools by chat completions, and one by responses that are not stored.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const asked = JSON.parse(process.argv[2]);
const settings = { baseURL: `${asked.url}/v1`, apiKey: asked.key };
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => "sunny",
});

async function conversation(model, providerOptions) {
  const messages = [...asked.opening];
  const texts = [];
  for (const words of asked.words) {
    const said = streamText({
      model,
      messages,
      providerOptions,
      instructions: asked.system,
      tools: { weather },
      stopWhen: stepCountIs(3),
      maxOutputTokens: 1000,
      maxRetries: 0,
    });
    texts.push(await said.text);
  messages.push(...(await said.responseMessages), { role: "user", content: words });
  }
  return { texts };
}

const chat = createOpenAICompatible({ name: "ppd", ...settings })("sim");
const responses = createOpenAI(settings).responses("sim");
console.log(
  JSON.stringify({
    chat: await conversation(chat),
    responses: await conversation(responses, { openai: { store: false } }),
    errors: {},
  }),
);
