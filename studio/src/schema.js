// Reads the JSON Schema of recipes. What a form shows comes from here alone, so new methods and parameters need no page.
import { useMemo } from "preact/hooks";
import { useGet } from "./api.js";

const without = ({ $ref: _, ...rest }) => rest;

/** The schema with its references followed, one level at a time. */
export const reader = (root) => {
  const resolve = (s) => {
    if (!s?.$ref) return s ?? {};
    const target = s.$ref.slice(2).split("/").reduce((at, key) => at[key], root);
    return { ...resolve(target), ...without(s) };
  };
  /** The variant of a value that may be several things: the one that the value is now, else the first. */
  const variant = (s, value) => {
    const found = resolve(s);
    const all = found.anyOf?.filter((v) => !v.required).map(resolve);
    if (!all?.length) return found;
    const chosen = (value !== undefined && all.find((v) => fits(variant(v, value), value))) || all[0];
    const { anyOf: _, ...rest } = found;
    return { ...variant(chosen, value), ...rest };
  };
  const methods = {};
  for (const rule of resolve(root.$defs.methods).allOf) for (const name of rule.if.properties.method.enum) methods[name] = describe(name, rule.then, variant);
  const perModel = [...new Set(Object.values(methods).flatMap((m) => m.parameters.filter((p) => p.per_model).map((p) => p.name)))];
  return { root, resolve, variant, methods, perModel };
};

/** What a control of a kind can show: `choice`, `flag`, `number`, `text`, `lines`, `record`, `list`, or `raw` for anything else. */
export const kind = (s) => {
  const type = Array.isArray(s.type) ? s.type.find((t) => t !== "null") : s.type;
  if (s.enum) return "choice";
  if (type === "boolean") return "flag";
  if (type === "number" || type === "integer") return "number";
  if (type === "string") return "text";
  if (type === "object" && s.properties) return "record";
  if (type === "array" && s.items?.type === "string") return "lines";
  if (type === "array" && s.items?.$ref) return "list";
  return "raw";
};
const fits = (s, value) => {
  const is = kind(s);
  if (is === "choice") return s.enum.includes(value);
  if (is === "lines" || is === "list") return Array.isArray(value);
  if (is === "record") return typeof value === "object" && value !== null && !Array.isArray(value) && Object.keys(value).every((k) => k in s.properties);
  return is === "raw" ? s.type === (Array.isArray(value) ? "array" : typeof value) : typeof value === { flag: "boolean", number: "number", text: "string" }[is];
};

const describe = (name, { title, description, properties }, variant) => {
  const each = properties.models.items.properties;
  const parameters = Object.entries(properties.parameters.properties).map(([key, s]) => {
    const plain = variant(s);
    return { name: key, help: s.description, kind: kind(plain), whole: plain.type === "integer", choices: plain.enum, default: s.default, low: s.minimum, high: s.maximum, per_model: key in each };
  });
  return { name, summary: title, description, parameters, base: properties.base.description };
};

/** The schema, and every method with its parameters and what is known of it besides. */
export function useSchema() {
  const { data: root, error } = useGet("/api/schema");
  const { data: facts, error: failed } = useGet("/api/methods");
  const schema = useMemo(() => root && reader(root), [root]);
  const methods = useMemo(() => schema && facts && facts.map((f) => ({ ...f, needs: f.base, ...schema.methods[f.name] })), [schema, facts]);
  return { schema, methods, error: error ?? failed };
}
