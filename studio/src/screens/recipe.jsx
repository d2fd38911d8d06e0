import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, go, keep, kept, post, query, useGet } from "../api.js";
import { bytes } from "../format.js";
import { Badge, Busy, Button, Card, Check, Failure, Field, home, Note, Select, Slider, TextField, useItems } from "../ui.jsx";

/** A text with `code` in it. */
const Prose = ({ text }) => text.split("`").map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part));
const entry = (m) => (typeof m === "string" ? { path: m } : m);

export function Recipe({ path }) {
  const [state, set] = useState(null);
  const [error, fail] = useState();
  const turn = useRef(0);
  const { data: methods } = useGet("/api/methods");
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
    else (home()).then(({ items }) => {
      const models = items.filter((i) => i.kind === "checkpoint").slice(0, 2).map(({ path: p }) => ({ path: p, weight: 0.5 }));
      send({ document: { method: "linear", models } }, 0);
    }, fail);
  }, [path]);
  const edit = (document) => { set((s) => ({ ...s, document })); keep("draft", { document }); send({ document }); };
  const write = (text) => { set((s) => ({ ...s, text })); keep("draft", { text }); send({ text }); };
  return (
    <>
      <div class="head"><div><h1>Recipe</h1>{path && <p class="muted path">{path}</p>}</div>
        <div class="row">{path && <Button onClick={() => { keep("draft", null); go("recipe"); }}>New recipe</Button>}</div></div>
      <Failure error={error} />
      {!state || !methods ? !error && <Busy /> : (
        <div class="columns even">
          <div>{state.native ? <Translated text={state.native} write={write} /> : <Form state={state} methods={methods} edit={edit} />}</div>
          <div><Written state={state} write={write} /><Plan state={state} path={path} /></div>
        </div>)}
    </>
  );
}

/** A recipe of mergekit's as we read it. */
const Translated = ({ text, write }) => (
  <Card title="Translated from mergekit's dialect" actions={<Button onClick={() => write(text)}>Use the translation</Button>}>
    <p>The recipe can be merged as it is. This is what it means in our own dialect:</p><pre tabindex="0">{text}</pre>
  </Card>
);

function Form({ state, methods, edit }) {
  const models = useItems("checkpoint", "adapter");
  const d = state.document;
  if (!d || !d.method || d.slices || !Array.isArray(d.models ?? []))
    return <Card title="Form"><Note>This recipe uses more than the form has. Edit it as text.</Note></Card>;
  const method = methods.find((m) => m.name === d.method);
  const given = (d.models ?? []).map(entry);
  const put = (values) => edit(Object.fromEntries(Object.entries({ ...d, ...values }).filter(([, v]) => v !== undefined && v !== "" && !(typeof v === "object" && v && !Array.isArray(v) && !Object.keys(v).length))));
  const setModel = (i, values) => put({ models: given.map((m, k) => (k === i ? { ...m, ...values } : m)) });
  const per = method?.parameters.filter((p) => p.per_model && p.kind === "float") ?? [];
  return (
    <>
      <Card title="Models">
        {method?.base !== "none" && <Select label={`Base${method?.base === "required" ? "" : " (optional)"}`} value={d.base} empty="None" options={models.map((m) => m.path)} onInput={(base) => put({ base: base || undefined })} />}
        {given.map((m, i) => (
          <div class="model" key={i}>
            <Select label={`Model ${i + 1}`} value={m.path} empty={m.recipe ? "A recipe of its own" : "Choose…"} options={[...new Set([...models.map((x) => x.path), m.path].filter(Boolean))]} onInput={(path) => setModel(i, { path })} />
            {per.map((p) => <Value key={p.name} parameter={p} value={m[p.name] ?? d.parameters?.[p.name]} onInput={(v) => setModel(i, { [p.name]: v })} />)}
            <Button class="button small" aria-label={`Remove model ${i + 1}`} onClick={() => put({ models: given.filter((_, k) => k !== i) })}>Remove</Button>
          </div>))}
        <Button onClick={() => put({ models: [...given, { path: models.map((m) => m.path).find((p) => p !== d.base && !given.some((g) => g.path === p)) ?? "" }] })}>Add a model</Button>
      </Card>
      <Card title="Method">
        <MethodChoice methods={methods} value={d.method} onInput={(name) => put({ method: name, parameters: undefined, models: given.map(({ path }) => ({ path })) })} />
        {method && <MethodCard method={method} />}
        {method?.parameters.filter((p) => !p.per_model && p.kind !== "tuple").map((p) => <Value key={p.name} parameter={p} value={d.parameters?.[p.name]} onInput={(v) => put({ parameters: { ...d.parameters, [p.name]: v } })} />)}
        <Select label="Numbers of the output" value={d.output?.dtype} empty="As the base" options={["float32", "bfloat16", "float16"]} onInput={(dtype) => put({ output: { ...d.output, dtype: dtype || undefined } })} />
      </Card>
    </>
  );
}

export const MethodChoice = ({ methods, value, onInput }) => <Select label="Method" value={value} options={methods.map((m) => [m.name, `${m.name}: ${m.summary}`])} onInput={onInput} />;

export function MethodCard({ method }) {
  const [first, ...rest] = method.description.split("\n\n");
  return (
    <div class="method">
      <p class="formula"><Prose text={first} /></p>
      {rest.length > 0 && <details><summary>When to use it, and where it comes from</summary>{rest.map((p) => <p key={p}><Prose text={p} /></p>)}</details>}
      <p class="muted">{method.base === "required" ? "Works on task vectors: needs a base." : method.base === "none" ? "Works on the models themselves." : "A base is optional."}{method.statistics.length ? ` Needs ${method.statistics.join(", ")} statistics.` : ""}</p>
    </div>
  );
}

/** The control for a parameter: a slider, a list or a box; a gradient over depth is shown as text. */
export function Value({ parameter: p, value, onInput }) {
  const now = value ?? p.default;
  if (p.choices) return <Select label={p.name} help={p.help} value={now} options={p.choices} onInput={onInput} />;
  if (p.kind === "bool") return <Check label={`${p.name}: ${p.help}`} checked={!!now} onInput={onInput} />;
  if (typeof now === "object" && now !== null) return <Field label={p.name}><code>{JSON.stringify(now)}</code></Field>;
  if (p.kind === "int" || now == null) return <TextField label={p.name} help={p.help} value={now ?? ""} inputmode="decimal" onInput={(t) => onInput(t === "" ? undefined : Number(t))} />;
  return <Slider label={p.name} help={p.help} value={now} min={p.low ?? 0} max={p.high ?? Math.max(2, now)} onInput={onInput} />;
}

function Written({ state, write }) {
  const lines = state.text.split("\n").length;
  const marked = new Set(state.problems.map((p) => p.line));
  return (
    <Card title="YAML" actions={<Badge>{state.dialect}</Badge>}>
      <div class="editor">
        <ol aria-hidden="true">{Array.from({ length: lines }, (_, i) => <li key={i} class={marked.has(i + 1) ? "bad" : ""}>{i + 1}</li>)}</ol>
        <textarea aria-label="Recipe as YAML" spellcheck={false} wrap="off" rows={Math.max(8, lines + 1)} value={state.text} onInput={(e) => write(e.currentTarget.value)} />
      </div>
      <p class="muted">Paste a recipe of mergekit's here too.</p>
    </Card>
  );
}

function Plan({ state, path }) {
  const { plan, problems, text, beside } = state;
  const [out, setOut] = useState("merged");
  const [file, setFile] = useState(path ?? "recipe.yml");
  const [said, say] = useState();
  const [error, fail] = useState();
  const run = (work) => { fail(); say(); work.catch(fail); };
  const methods = useMemo(() => plan && Object.entries(plan.methods).map(([m, n]) => `${m} × ${n}`).join(", "), [plan]);
  return (
    <Card title="Plan" aria-live="polite">
      {problems.map((p) => <Note key={p.message} kind="bad">{p.line ? <strong>Line {p.line}. </strong> : null}{p.message}</Note>)}
      {plan && <>
        <dl class="facts"><dt>Tensors</dt><dd>{plan.tensors} ({methods}{plan.copied ? `, ${plan.copied} copied` : ""})</dd><dt>Reads</dt><dd>{bytes(plan.bytes_in)}</dd><dt>Writes</dt><dd>{bytes(plan.bytes_out)} in {plan.shards} file{plan.shards > 1 ? "s" : ""}</dd><dt>Memory</dt><dd>at most {bytes(plan.memory_bound)}</dd></dl>
        {plan.notes.map((n) => <Note key={n}>{n}</Note>)}
        <div class="row end"><TextField label="Merge into" value={out} onInput={setOut} />
          <Button kind="primary" onClick={() => run(post("/api/jobs", { kind: "merge", values: { text, out, beside } }).then((job) => go("jobs", { id: job.id })))}>Merge</Button></div>
      </>}
      <div class="row end"><TextField label="Save as" value={file} onInput={setFile} />
        <Button onClick={() => run(post("/api/recipe/save", { path: file, text, overwrite: file === path }).then((f) => say(`Saved ${f.path}.`)))}>Save</Button>
        <Button disabled={!state.document || state.dialect !== "native"} onClick={() => { keep("mix", state.document); go("mixer"); }}>Open in the mixer</Button></div>
      {said && <Note kind="good">{said}</Note>}<Failure error={error} />
    </Card>
  );
}
