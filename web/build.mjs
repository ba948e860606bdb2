// Bundles the page into the Python package. Users have no npm: the result is part of the repository.
import { copyFile, mkdir, readFile, writeFile } from "node:fs/promises";
import { build } from "esbuild";

const out = new URL("../src/shoal/dashboard/static/", import.meta.url).pathname;
const here = new URL(".", import.meta.url).pathname;
await mkdir(out, { recursive: true });
await build({
  entryPoints: [`${here}src/main.ts`],
  bundle: true,
  minify: true,
  target: "es2022",
  format: "esm",
  legalComments: "none",
  outfile: `${out}app.js`,
});
await build({ entryPoints: [`${here}src/style.css`], bundle: true, minify: true, outfile: `${out}app.css` });
await copyFile(`${here}src/index.html`, `${out}index.html`);

const texts = ["The page contains these libraries. Their licences follow.\n"];
for (const [name, licence] of [["twgl.js", "LICENSE.md"], ["uplot", "LICENSE"]]) {
  const folder = `${here}node_modules/${name}/`;
  const { version } = JSON.parse(await readFile(`${folder}package.json`, "utf8"));
  texts.push(`${name} ${version}\n\n${(await readFile(`${folder}${licence}`, "utf8")).trim()}\n`);
}
await writeFile(`${out}LICENSES.txt`, texts.join("\n----------------------------------------\n\n"));
