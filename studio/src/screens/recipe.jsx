import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, go, keep, kept, post, query } from "../api.js";
import { Fields, Node, put, Value } from "../form.jsx";
import { bytes } from "../format.js";
import { useSchema } from "../schema.js";
import { Badge, Busy, Button, Card, Check, Failure, family, home, Note, Prose, Select, TextField, useItems } from "../ui.jsx";

const entry = (m) => (typeof m === "string" ? { path: m } : m);

export function Recipe({ path }) {
  const [state, set] = useState(null);
  const [error, fail] = useState();
  const turn = useRef(0);
  const { schema, methods, error: missing } = useSchema();
  const send = async (body, wait = 250) => {
    const mine = ++turn.current;
    await new Promise((resolve) => setTimeout(resolve, wait));
    if (mine !== turn.current) return;
    try {
      const found = await post("/api/recipe", { beside: state?.beside, ...body });
      if (mine !== turn.current) return;
      fail();
      set((before) => ({ ...before, ...found, text: body.text ?? found.text, document: found.document ?? before?.document }));
    } catch (problem) { fail(problem); }
  };
  useEffect(() => {
    const draft = kept("draft");
    if (path) get(query("/api/recipe", { path })).then(set, fail);
    else if (draft?.text) send({ text: draft.text }, 0);
    else if (draft?.document) send({ document: draft.document }, 0);
    else Promise.all([family(), home()]).then(([{ base, models }, { items }]) => {
      const chosen = models.length > 1 ? models : items.filter((i) => i.kind === "checkpoint").map((i) => i.path);
      const entries = chosen.slice(0, 2).map((p) => ({ path: p, weight: 0.5 }));
      send({ document: base && models.length > 1 ? { method: "task_arithmetic", base, models: entries } : { method: "linear", models: entries } }, 0);
    }, fail);
  }, [path]);
  const edit = (document) => { set((s) => ({ ...s, document })); keep("draft", { document }); send({ document }); };
  const write = (text) => { set((s) => ({ ...s, text })); keep("draft", { text }); send({ text }); };
  return (
    <>
      <div class="head"><div><h1>Recipe</h1>{path && <p class="muted path">{path}</p>}</div>
        <div class="row">{path && <Button onClick={() => { keep("draft", null); go("recipe"); }}>New recipe</Button>}</div></div>
      <Failure error={error ?? missing} />
      {!state || !methods ? !error && <Busy /> : (
        <div class="columns even">
          <div>{state.native ? <Translated text={state.native} write={write} /> : <Form state={state} schema={schema} methods={methods} edit={edit} />}</div>
          <div class="follow"><Written state={state} write={write} /><Plan state={state} path={path} /></div>
        </div>)}
    </>
  );
}

/** A mergekit recipe in our own format. */
const Translated = ({ text, write }) => (
  <Card title="Translated from mergekit" actions={<Button onClick={() => write(text)}>Use the translation</Button>}>
    <p>You can merge this recipe as it is. In Merganser's own format it reads:</p><pre tabindex="0">{text}</pre>
  </Card>
);

/** Fields that have a place of their own on the form; the others are under "More", whatever the schema has. */
const PLACED = ["method", "base", "models", "parameters", "output"];

function Form({ state, schema, methods, edit }) {
  const items = useItems("checkpoint", "adapter");
  const d = state.document;
  if (!d) return <Card title="Form"><Note>The form follows once the text is one recipe.</Note></Card>;
  const { properties } = schema.root, entries = schema.resolve({ $ref: "#/$defs/entry" });
  const method = methods.find((m) => m.name === d.method || m.also.includes(d.method)) ?? { parameters: [] };
  const set = (key, value) => edit(put(d, key, value));
  const parameter = (name, value) => set("parameters", put(d.parameters, name, value));
  const listed = d.models === undefined || Array.isArray(d.models), given = listed ? (d.models ?? []).map(entry) : [];
  const setModel = (i, model) => set("models", given.map((m, k) => (k === i ? model : m)));
  const per = method.parameters.filter((p) => p.per_model), shared = method.parameters.filter((p) => !p.per_model);
  const further = Object.keys(d.parameters ?? {}).filter((k) => !shared.some((p) => p.name === k));
  const paths = (now) => [...new Set([...items.map((m) => m.path), ...(typeof now === "string" ? [now] : [])])];
  const fresh = items.map((m) => m.path).find((p) => p !== d.base && !given.some((g) => g.path === p)) ?? "";
  const change = (name) => edit({ ...put(d, "parameters"), method: name, ...(listed && d.models ? { models: given.map((m) => Object.fromEntries(Object.entries(m).filter(([k]) => !per.some((p) => p.name === k)))) } : {}) });
  return (
    <>
      <Card title="Models">
        {typeof d.base === "object" ? <Node schema={schema} of={properties.base} label="base" value={d.base} onInput={(v) => set("base", v)} />
          : <Select label="base" help={`${schema.resolve(properties.base).description} ${method.base ?? ""}`} value={d.base} empty="None" options={paths(d.base)} onInput={(v) => set("base", v)} />}
        {listed ? given.map((m, i) => (
          <div class="model" key={i}>
            {m.recipe ? <Node schema={schema} of={entries.properties.recipe} label={`Model ${i + 1}, a recipe`} value={m.recipe} onInput={(v) => setModel(i, put(m, "recipe", v))} />
              : <Select label={`Model ${i + 1}`} value={m.path} empty="Choose…" options={paths(m.path)} onInput={(v) => setModel(i, { ...m, path: v })} />}
            {per.map((p) => <Value key={p.name} parameter={p} value={m[p.name] ?? d.parameters?.[p.name]} onInput={(v) => setModel(i, put(m, p.name, v))} />)}
            <div class="row between top"><details open={Object.keys(m).some((k) => k !== "path" && k !== "recipe" && !per.some((p) => p.name === k))}><summary>More options for model {i + 1}</summary>
              <Fields schema={schema} of={entries} value={m} except={["path", "recipe", ...schema.perModel]} onInput={(v) => setModel(i, v)} /></details>
              <Button kind="small" aria-label={`Remove model ${i + 1}`} onClick={() => set("models", given.filter((_, k) => k !== i))}>Remove</Button></div>
          </div>)) : <Node schema={schema} of={properties.models} label="models" value={d.models} onInput={(v) => set("models", v)} />}
        {listed && <Button onClick={() => set("models", [...given, { path: fresh }])}>Add a model</Button>}
      </Card>
      <Card title="Method">
        <MethodChoice methods={methods} value={method.name} onInput={change} />
        {method.name && <MethodCard method={method} />}
        {shared.map((p) => <Value key={p.name} parameter={p} value={d.parameters?.[p.name]} onInput={(v) => parameter(p.name, v)} />)}
        {further.map((k) => per.some((p) => p.name === k) ? <Value key={k} parameter={{ ...per.find((p) => p.name === k), name: `${k}, all models` }} value={d.parameters[k]} onInput={(v) => parameter(k, v)} /> : <Node key={k} schema={schema} of={schema.resolve(properties.parameters).properties[k] ?? {}} label={k} value={d.parameters[k]} onInput={(v) => parameter(k, v)} />)}
      </Card>
      <Card title="Output"><details open={d.output !== undefined}><summary>dtype, tokenizer, chat template, quantisation</summary><Fields schema={schema} of={schema.resolve(properties.output)} value={d.output} onInput={(v) => set("output", v)} /></details></Card>
      <Card title="More"><Fields schema={schema} of={{ properties }} value={d} except={PLACED} onInput={edit} /></Card>
    </>
  );
}

export const MethodChoice = ({ methods, value, onInput }) => <Select label="Method" value={value} empty={value ? undefined : "Choose…"} options={methods.map((m) => [m.name, `${m.name}: ${m.summary}`])} onInput={onInput} />;

export function MethodCard({ method }) {
  const [first, ...rest] = method.description.split("\n\n");
  return (
    <div class="method">
      <p class="formula"><Prose text={first} /></p>
      {rest.length > 0 && <details><summary>When to use it, and where it comes from</summary>{rest.map((p) => <p key={p}><Prose text={p} /></p>)}</details>}
      <p class="muted">{method.needs === "required" ? "Works on task vectors: needs a base." : method.needs === "none" ? "Works on the models themselves." : "A base is optional."}{method.statistics.length ? ` Needs ${method.statistics.join(", ")} statistics.` : ""}</p>
    </div>
  );
}

function Written({ state, write }) {
  const lines = state.text.split("\n").length;
  const marked = new Set(state.problems.map((p) => p.line));
  return (
    <Card title="YAML" actions={<Badge>{state.dialect === "native" ? "Merganser" : state.dialect} format</Badge>}>
      <div class="editor">
        <ol aria-hidden="true">{Array.from({ length: lines }, (_, i) => <li key={i} class={marked.has(i + 1) ? "bad" : ""}>{i + 1}</li>)}</ol>
        <textarea aria-label="Recipe as YAML" spellcheck={false} wrap="off" rows={Math.max(8, lines + 1)} value={state.text} onInput={(e) => write(e.currentTarget.value)} />
      </div>
      <p class="muted">You can also paste a mergekit recipe here.</p>
    </Card>
  );
}

function Plan({ state, path }) {
  const { plan, problems, text, beside } = state;
  const [out, setOut] = useState("merged");
  const [file, setFile] = useState(path ?? "recipe.yml");
  const [over, overwrite] = useState(false);
  const [said, say] = useState();
  const [error, fail] = useState();
  const run = (work) => { fail(); say(); work.catch(fail); };
  const mix = async () => {
    const { document } = state.native ? await post("/api/recipe", { text: state.native, beside }) : state;
    const shown = (p) => (typeof p === "string" && !p.startsWith("/") ? `${beside && beside !== "." ? `${beside}/` : ""}${p.replace(/^(\.\/)+/, "")}` : p);
    keep("mix", { ...document, base: shown(document.base), models: document.models.map(entry).map(({ parameters, ...m }) => ({ ...m, ...parameters, path: shown(m.path) })) });
    go("mixer");
  };
  const methods = useMemo(() => plan && Object.entries(plan.methods).map(([m, n]) => `${m} × ${n}`).join(", "), [plan]);
  return (
    <Card title="Plan" aria-live="polite">
      {problems.map((p) => <Note key={p.message} kind="bad">{p.line ? <strong>Line {p.line}. </strong> : null}{p.message}</Note>)}
      {plan && <>
        <dl class="facts"><dt>Tensors</dt><dd>{plan.tensors} ({methods}{plan.copied ? `, ${plan.copied} copied` : ""})</dd><dt>Reads</dt><dd>{bytes(plan.bytes_in)}</dd><dt>Writes</dt><dd>{bytes(plan.bytes_out)} in {plan.shards} file{plan.shards > 1 ? "s" : ""}</dd><dt>Memory</dt><dd>at most {bytes(plan.memory_bound)}</dd></dl>
        {plan.notes.map((n) => <Note key={n}>{n}</Note>)}
        <div class="row end"><TextField label="Merge into" value={out} onInput={setOut} />
          <Button kind="primary" onClick={() => run(post("/api/jobs", { kind: "merge", values: { text, out, beside, overwrite: over } }).then((job) => go("jobs", { id: job.id })))}>Merge</Button></div>
        <Check label="Replace it if it exists" checked={over} onInput={overwrite} />
      </>}
      <div class="row end"><TextField label="Save as" value={file} onInput={setFile} />
        <Button onClick={() => run(post("/api/recipe/save", { path: file, text, overwrite: file === path }).then((f) => say(`Saved ${f.path}.`)))}>Save</Button>
        <Button disabled={!plan || !Array.isArray(state.document?.models)} onClick={() => run(mix())}>Open in the mixer</Button></div>
      {said && <Note kind="good">{said}</Note>}<Failure error={error} />
    </Card>
  );
}
