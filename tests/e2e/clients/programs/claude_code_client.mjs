// npm: "@anthropic-ai/claude-code@2.1.330"
// Claude Code, in print mode: each of the words continues one conversation. A home and a folder of its own; nothing else
// of this machine's environment is passed on.

import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const asked = JSON.parse(process.argv[2]);
const claude = fileURLToPath(new URL("node_modules/.bin/claude", import.meta.url));
const root = mkdtempSync(join(tmpdir(), "client-"));
const env = {
  PATH: process.env.PATH,
  HOME: root,
  TZ: "UTC",
  LANG: "C.UTF-8",
  ANTHROPIC_BASE_URL: asked.url,
  ANTHROPIC_API_KEY: asked.key,
  ANTHROPIC_MODEL: "sim",
  ANTHROPIC_DEFAULT_HAIKU_MODEL: "sim",
  CLAUDE_CODE_MAX_OUTPUT_TOKENS: "1000",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  DISABLE_AUTOUPDATER: "1",
  DISABLE_ERROR_REPORTING: "1",
  DISABLE_TELEMETRY: "1",
};
const texts = [];
try {
  const cwd = join(root, "walk");
  mkdirSync(cwd);
  for (const words of asked.words) {
    const started = texts.length ? ["--continue"] : [];
    const tools = ["--tools", "Read,Grep"];
    const said = spawnSync(claude, ["--print", ...started, ...tools], {
      cwd,
      env,
      input: words,
      encoding: "utf8",
      timeout: 120_000,
    });
    if (said.status !== 0) throw new Error(`claude: ${said.error ?? said.stderr + said.stdout}`);
    texts.push(said.stdout);
  }
} finally {
  rmSync(root, { recursive: true, force: true });
}
console.log(JSON.stringify({ messages: { texts }, errors: {} }));
