// Packages out of SDK_FOLDER: these programs stand elsewhere.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const found = createRequire(`${process.env.SDK_FOLDER}/package.json`);
export const load = (name) => import(pathToFileURL(found.resolve(name)).href);
const rules = [...Array(80).keys()].map((n) => `Rule ${n}: the staff must file form ${n * 7} before noon.`);
export const handbook = rules.join(" ");
