// Builds the page that the wheel ships: `npm ci && npm run build` in this directory. `node build.mjs DIR` builds elsewhere.
import { build } from "esbuild";
import { copyFileSync, mkdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "../src/merganser/studio/static");

mkdirSync(out, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { studio: "src/main.jsx" },
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  outdir: out,
});
for (const file of ["index.html", "icon.svg"]) copyFileSync(join(here, "src", file), join(out, file));
