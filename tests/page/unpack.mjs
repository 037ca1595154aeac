// node unpack.mjs FOLDER: writes Chromium, and libraries that not every system has, into the folder.
import { chmod, mkdir, readFile, rename, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { brotliDecompressSync } from "node:zlib";

const [, , folder] = process.argv;
const from = join(dirname(createRequire(import.meta.url).resolve("@sparticuz/chromium")), "../../bin");
await mkdir(folder, { recursive: true });
for (const name of ["al2023.tar", "fonts.tar", "chromium"]) {
  const part = join(folder, `.${name}.${process.pid}`);
  await writeFile(part, brotliDecompressSync(await readFile(join(from, `${name}.br`))));
  await chmod(part, 0o755);
  await rename(part, join(folder, name));
}
