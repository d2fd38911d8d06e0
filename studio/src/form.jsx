// Controls made from a JSON Schema.
import { useState } from "preact/hooks";
import { kind } from "./schema.js";
import { Button, Check, Field, Select, Slider, TextField } from "./ui.jsx";

/** Records with more fields than this show those that are set, and a list to add others from. */
const MANY = 6;
const empty = (v) => v === undefined || v === "" || (typeof v === "object" && v !== null && !Object.keys(v).length);
/** A record with a field set, or left out if the value is empty. */
export const put = (record, key, value) => {
  const { [key]: _, ...rest } = record ?? {};
  return empty(value) ? rest : { ...record, [key]: value };
};

/** The control for a value of a schema. */
export function Node({ schema, of, label, value, onInput }) {
  const s = schema.variant(of, value), is = kind(s), help = s.description;
  if (is === "choice") return <Select label={label} help={help} value={value} empty="Not set" options={s.enum} onInput={(v) => onInput(v || undefined)} />;
  if (is === "flag") return <Select label={label} help={help} value={value === undefined ? "" : String(value)} empty="Not set" options={[["true", "yes"], ["false", "no"]]} onInput={(v) => onInput(v === "" ? undefined : v === "true")} />;
  if (is === "number") return <NumberField label={label} help={help} value={value} onInput={onInput} />;
  if (is === "text") return <TextField label={label} help={help} value={value ?? ""} onInput={(v) => onInput(v || undefined)} />;
  if (is === "lines") return <Field label={label} help={help ?? "One a line."}>{(id) => <textarea id={id} rows={Math.max(2, value?.length ?? 0)} value={(value ?? []).join("\n")} onChange={(e) => onInput(e.currentTarget.value.split("\n").map((t) => t.trim()).filter(Boolean))} />}</Field>;
  if (is === "record") return <fieldset class="record"><legend>{label}</legend>{help && <small class="muted">{help}</small>}<Fields schema={schema} of={s} value={value} onInput={onInput} /></fieldset>;
  if (is === "list") return <List schema={schema} of={s} label={label} value={value ?? []} onInput={onInput} />;
  return <Raw label={label} help={help} value={value} onInput={onInput} />;
}

/** The fields of a record, but for those that are shown elsewhere. */
export function Fields({ schema, of, value = {}, onInput, except = [] }) {
  const names = Object.keys(of.properties).filter((n) => !except.includes(n));
  const [added, add] = useState([]);
  const shown = names.length > MANY ? names.filter((n) => value[n] !== undefined || added.includes(n)) : names;
  const rest = names.filter((n) => !shown.includes(n));
  return (
    <>
      {shown.map((n) => <Node key={n} schema={schema} of={of.properties[n]} label={n} value={value[n]} onInput={(v) => onInput(put(value, n, v))} />)}
      {rest.length > 0 && <Select label="Add a field" value="" empty="Choose…" options={rest} onInput={(n) => n && add([...added, n])} />}
    </>
  );
}

function List({ schema, of, label, value, onInput }) {
  const change = (i, v) => onInput(value.map((old, k) => (k === i ? v : old)));
  return (
    <fieldset class="record"><legend>{label}</legend>
      {value.map((v, i) => (
        <div class="model" key={i}>
          <Node schema={schema} of={of.items} label={`${label} ${i + 1}`} value={v} onInput={(next) => change(i, next ?? {})} />
          <Button kind="small" aria-label={`Remove ${label} ${i + 1}`} onClick={() => onInput(value.filter((_, k) => k !== i))}>Remove</Button>
        </div>))}
      <Button kind="small" onClick={() => onInput([...value, {}])}>Add one</Button>
    </fieldset>
  );
}

function NumberField({ label, help, value, onInput }) {
  const set = (text) => { const x = Number(text); if (text === "") onInput(undefined); else if (Number.isFinite(x)) onInput(x); };
  return <Field label={label} help={help}>{(id) => <input id={id} type="number" step="any" value={value ?? ""} onInput={(e) => set(e.currentTarget.value)} />}</Field>;
}

/** Anything else, as JSON, which is YAML too: a gradient over depth, a value for each glob, a recipe inside a recipe. */
function Raw({ label, help, value, onInput }) {
  const [draft, write] = useState(null);
  const read = (text) => { try { return { value: text.trim() ? JSON.parse(text) : undefined }; } catch { return null; } };
  const type = (text) => { const found = read(text); write(found ? null : text); if (found) onInput(found.value); };
  return (
    <Field label={label} help={help}>{(id) => <>
      <textarea id={id} rows="2" spellcheck={false} placeholder="as JSON" value={draft ?? (value === undefined ? "" : JSON.stringify(value))} aria-invalid={draft != null} onChange={(e) => type(e.currentTarget.value)} />
      {draft != null && <small class="problem" role="alert">This is not JSON.</small>}</>}
    </Field>
  );
}

/** The control for a parameter of a method: a slider, a list or a box; a gradient or a value for each glob as text. */
export function Value({ parameter: p, value, onInput }) {
  const now = value ?? p.default;
  if (typeof now === "object" && now !== null && p.kind !== "lines") return <Raw label={p.name} help={p.help} value={now} onInput={onInput} />;
  if (p.kind === "choice") return <Select label={p.name} help={p.help} value={now} options={p.choices} onInput={onInput} />;
  if (p.kind === "flag") return <Check label={`${p.name}: ${p.help}`} checked={!!now} onInput={onInput} />;
  if (p.kind === "lines") return <Field label={p.name} help={`${p.help}; one a line`}>{(id) => <textarea id={id} rows="2" value={(now ?? []).join("\n")} onChange={(e) => { const lines = e.currentTarget.value.split("\n").filter((t) => t.trim()); onInput(lines.length ? lines : undefined); }} />}</Field>;
  if (p.kind === "text") return <TextField label={p.name} help={p.help} value={now ?? ""} onInput={(t) => onInput(t || undefined)} />;
  if (p.whole || now == null) return <NumberField label={p.name} help={p.help} value={now} onInput={onInput} />;
  return <Slider label={p.name} help={p.help} value={now} min={p.low ?? 0} max={p.high ?? Math.max(2, now)} onInput={onInput} />;
}
