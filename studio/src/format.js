// Numbers as people read them.
export const bytes = (n) => {
  if (n == null) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${i ? n.toFixed(1) : n} ${units[i]}`;
};
export const count = (n) => {
  if (n == null) return "";
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (n >= size) return `${(n / size).toPrecision(3)}${unit}`;
  return String(n);
};
export const number = (x, digits = 3) => {
  if (x == null || Number.isNaN(x)) return "–";
  const near = Number(x.toPrecision(digits)), size = Math.abs(near);
  return size >= 1e6 ? near.toExponential().replace("+", "") : size >= 1e3 ? near.toLocaleString("en") : near.toString();
};
/** A score, with as many digits as the others beside it. */
export const score = (x) => (x == null || Math.abs(x) >= 1e3 ? number(x, 4) : Math.abs(x) >= 10 ? x.toPrecision(4) : x.toFixed(3));
export const percent = (x, digits = 0) => (x == null ? "–" : `${(100 * x).toFixed(digits)} %`);
export const duration = (seconds) => {
  if (seconds == null) return "";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  return s < 60 ? `${s} s` : s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
};
export const ago = (time) => {
  const s = Date.now() / 1000 - time;
  for (const [size, unit] of [[86400, "day"], [3600, "hour"], [60, "minute"]])
    if (s >= size) return `${Math.floor(s / size)} ${unit}${s >= 2 * size ? "s" : ""} ago`;
  return "just now";
};
export const name = (path) => (path ?? "").replace(/\/+$/, "").split("/").pop().replace(/\.(safetensors|gguf|yml|yaml|sqlite)$/, "");

/** Names of tensors without what they all begin with. */
export const ends = (names) => {
  const shared = (names[0] ?? "").split(".").filter((_, i, words) => i < words.length - 1 && names.every((n) => n.startsWith(`${words.slice(0, i + 1).join(".")}.`))).join(".");
  return shared ? names.map((n) => n.slice(shared.length + 1)) : names;
};
/** The block of a tensor (up to its first number) and what is left of its name. */
export const place = (tensor) => {
  const found = tensor.match(/^((?:[^.]+\.)*?\d+)\.(.+)$/);
  return found ? [found[1], found[2].replace(/\.weight$/, "")] : ["", tensor.replace(/\.weight$/, "")];
};
