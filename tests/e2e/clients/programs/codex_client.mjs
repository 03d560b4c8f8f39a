// npm: "@openai/codex@0.169.0"
// Codex CLI, not interactive: each of the words resumes one conversation, by responses that are not stored. A home and a
// folder of its own; nothing else of this machine's environment is passed on.

import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const asked = JSON.parse(process.argv[2]);
const codex = fileURLToPath(new URL("node_modules/.bin/codex", import.meta.url));
const root = mkdtempSync(join(tmpdir(), "client-"));
const home = join(root, ".codex");
const env = { PATH: process.env.PATH, HOME: root, CODEX_HOME: home, TZ: "UTC", LANG: "C.UTF-8", PPD_KEY: asked.key };
const config = `
model = "sim"
model_provider = "ppd"
model_context_window = 1000000
approval_policy = "never"
sandbox_mode = "read-only"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.ppd]
name = "ppd"
base_url = "${asked.url}/v1"
env_key = "PPD_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0

[features]
apps = false
goals = false
plugins = false

[analytics]
enabled = false

[otel]
exporter = "none"
`;
const texts = [];
try {
  const cwd = join(root, "walk");
  mkdirSync(cwd);
  mkdirSync(home);
  writeFileSync(join(home, "config.toml"), config);
  for (const words of asked.words) {
    const resumed = texts.length ? ["resume", "--last"] : [];
    const said = spawnSync(process.execPath, [codex, "exec", ...resumed, "--skip-git-repo-check", "-"], {
      cwd,
      env,
      input: words,
      encoding: "utf8",
      timeout: 120_000,
    });
    if (said.status !== 0) throw new Error(`codex: ${said.error ?? said.stderr + said.stdout}`);
    texts.push(said.stdout);
  }
} finally {
  rmSync(root, { recursive: true, force: true });
}
console.log(JSON.stringify({ responses: { texts }, errors: {} }));
