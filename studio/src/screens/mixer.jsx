import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { go, keep, link, remove, useKept, useStream } from "../api.js";
import { SERIES } from "../charts.jsx";
import { Value } from "../form.jsx";
import { name, number } from "../format.js";
import { Asking, Scored, useQuestions, Verdict } from "../questions.jsx";
import { useSchema } from "../schema.js";
import { Busy, Button, Card, Check, Failure, family, Note, Select, Slider, useItems } from "../ui.jsx";
import { MethodCard, MethodChoice } from "./recipe.jsx";

const SPAN = { weight: [0, 1.5], density: [0, 1], scale: [0, 2] };
const PROMPT = { text: "Once upon a time", tokens: 40, temperature: 0, seed: 0, chat: false };

/** The recipe that the controls mean. A parameter with an end value is a gradient over depth. */
export const documentOf = (mix) => {
  const value = (v) => (Array.isArray(v) && v[0] === v[1] ? v[0] : v);
  const clean = (values) => Object.fromEntries(Object.entries(values).filter(([, v]) => v != null).map(([k, v]) => [k, value(v)]));
  return clean({ ...mix, base: mix.base || undefined, models: mix.models.map(clean), parameters: clean(mix.parameters ?? {}) });
};

export function Mixer() {
  const items = useItems("checkpoint", "adapter").filter((i) => i.facts.live || i.kind === "adapter" || i.facts.architecture);
  const { methods: all, error } = useSchema();
  const methods = useMemo(() => all?.filter((m) => !m.statistics.length && m.reach !== "whole"), [all]);
  const [mix, set] = useKept("mix", null);
  useEffect(() => {
    if (mix?.models?.length || items.length < 1) return;
    family().then(({ base, models }) => base && set({ method: "task_arithmetic", base, models: models.slice(0, 2).map((path) => ({ path, weight: 0.5 })), parameters: {} }), () => {});
  }, [items.length]);
  if (error) return <Failure error={error} />;
  if (!methods) return <Busy />;
  return (
    <>
      <div class="head"><div><h1>Mixer</h1><p class="muted">Move a weight and read what the merged model says. Nothing is written to disk.</p></div></div>
      {!mix?.models?.length
        ? <Note>The mixer needs two language models of one architecture in this folder, with their configs and tokenizers. Others can be merged with a <a href={link("recipe")}>recipe</a>.</Note>
        : <Desk mix={{ ...mix, models: mix.models.map((m) => (typeof m === "string" ? { path: m } : m)) }} set={set} methods={methods} items={items} />}
    </>
  );
}

function Desk({ mix, set, methods, items }) {
  const [prompt, setPrompt] = useKept("prompt", PROMPT);
  const [measure, setMeasure] = useKept("measure", false);
  const [questions, chosen, choose] = useQuestions();
  const [out, setOut] = useState({ text: "" });
  const [pins, setPins] = useKept("pins", {});
  const document = useMemo(() => documentOf(mix), [mix]);
  const timer = useRef();
  const play = useStream("/api/play", (e) => setOut((o) => {
    if (e.event === "merged") return { ...o, merged: e, text: "", loss: null, score: null };
    if (e.event === "token") return { ...o, text: o.text + e.text };
    if (e.event === "classes") return { ...o, classes: e.classes };
    if (e.event === "loss") return { ...o, loss: e.loss };
    if (e.event === "score") return { ...o, score: e };
    return o;
  }));
  const listen = () => play.start({ documents: [document], prompt, builtin: measure, questions });
  useEffect(() => {
    clearTimeout(timer.current);
    timer.current = setTimeout(listen, 120);
    return () => clearTimeout(timer.current);
  }, [document, prompt, measure, questions?.path, questions?.limit]);
  const method = methods.find((m) => m.name === mix.method) ?? methods[0];
  const per = method.parameters.filter((p) => p.per_model && p.kind === "number");
  const shared = method.parameters.filter((p) => !p.per_model);
  const change = (values) => set({ ...mix, ...values });
  const setModel = (i, values) => change({ models: mix.models.map((m, k) => (k === i ? { ...m, ...values } : m)) });
  const now = { document, prompt: prompt.text, text: out.text, loss: out.loss, score: out.score, mix };
  return (
    <div class="columns mixer">
      <div>
        <Card title="Mix">
          <MethodChoice methods={methods} value={method.name} onInput={(m) => change({ method: m, parameters: {} })} />
          <details><summary>About {method.name}</summary><MethodCard method={method} /></details>
          {method.needs !== "none" && <Select label="Base" value={mix.base} empty="None" options={[...new Set([...items.map((i) => i.path), ...(mix.base ? [mix.base] : [])])]} onInput={(base) => change({ base })} />}
          {mix.models.map((m, i) => (
            <div class="model" key={i} style={{ borderColor: SERIES[i % SERIES.length] }}>
              <div class="row between"><strong>{name(m.path)}</strong>
                <Button kind="small" aria-label={`Remove ${m.path}`} disabled={mix.models.length < 2} onClick={() => change({ models: mix.models.filter((_, k) => k !== i) })}>Remove</Button></div>
              {per.map((p) => <Depth key={p.name} parameter={p} label={p.name} of={` of ${name(m.path)}`} value={m[p.name]} onInput={(v) => setModel(i, { [p.name]: v })} />)}
            </div>))}
          <Select label="Add a model" value="" empty="Choose…" options={items.map((i) => i.path).filter((p) => p !== mix.base && !mix.models.some((m) => m.path === p))} onInput={(path) => path && change({ models: [...mix.models, { path, weight: 0.5 }] })} />
          {shared.length > 0 && <><h3>For all models</h3>{shared.map((p) => SPAN[p.name] && typeof (p.default ?? 1) === "number" ? <Depth key={p.name} parameter={p} label={p.name} value={mix.parameters?.[p.name]} onInput={(v) => change({ parameters: { ...mix.parameters, [p.name]: v } })} /> : <Value key={p.name} parameter={p} value={mix.parameters?.[p.name]} onInput={(v) => change({ parameters: { ...mix.parameters, [p.name]: v } })} />)}</>}
          <div class="row"><Button kind="primary" onClick={() => { keep("draft", { document }); go("recipe"); }}>To a recipe</Button>
            <Button onClick={() => remove("/api/play").then(() => setOut({ text: "" }))}>Free the memory</Button></div>
        </Card>
      </div>
      <div>
        <Card title="What it says">
          <Prompting prompt={prompt} set={setPrompt} />
          <div class="said" aria-live="polite" aria-busy={play.running}>
            <span class="muted">{prompt.text}</span><span>{out.text}</span>{play.running && <span class="caret" aria-hidden="true" />}
            {out.classes && <ul class="plain">{out.classes.slice(0, 8).map(([c, p]) => <li key={c} class="bar-row"><span>{c}</span><span class="bar"><i style={{ width: `${100 * p}%` }} /></span><span class="num">{number(p)}</span></li>)}</ul>}
          </div>
          <p class="muted" role="status">{out.merged ? `${out.merged.tensors} of ${out.merged.of} tensors merged again in ${number(out.merged.seconds, 2)} s (${number(out.merged.processor, 2)} s of processor)` : play.running ? "Loading the models: the first time takes a while…" : ""}{out.loss != null && ` · perplexity ${number(Math.exp(out.loss), 4)} on built-in texts`}</p>
          <Failure error={play.error} />
          <Asking chosen={chosen} set={choose} />
          {questions && <Scored score={out.score} />}
          {["A", "B"].map((k) => pins[k]?.score && out.score && pins[k].score !== out.score && !(pins.A && pins.B) && <Verdict key={k} left={out.score} right={pins[k].score} names={["this mix", `pin ${k}`]} />)}
          <div class="row"><Check label="Measure perplexity" checked={measure} onInput={setMeasure} />
            {["A", "B"].map((k) => <Button key={k} disabled={!out.text || play.running} onClick={() => setPins({ ...pins, [k]: now })}>Pin as {k}</Button>)}
            {pins.A && pins.B && <Button onClick={() => { keep("compare", [pins.A, pins.B].map((p, i) => ({ label: `Pin ${"AB"[i]}`, document: p.document }))); go("compare"); }}>Compare A and B</Button>}</div>
        </Card>
        {pins.A && pins.B && <Paired pins={pins} setPins={setPins} questions={questions} />}
        <div class="pins">{["A", "B"].filter((k) => pins[k]).map((k) => (
          <Card key={k} title={`Pin ${k}`} actions={<><Button kind="small" onClick={() => set(pins[k].mix)}>Back to it</Button><Button kind="small" aria-label={`Remove pin ${k}`} onClick={() => setPins({ ...pins, [k]: undefined })}>Remove</Button></>}>
            <p class="said"><span class="muted">{pins[k].prompt}</span>{pins[k].text}</p>
            <p class="muted">{describe(pins[k].document)}{pins[k].loss != null && ` · perplexity ${number(Math.exp(pins[k].loss), 4)}`}</p>
            <Scored score={pins[k].score} />
          </Card>))}</div>
      </div>
    </div>
  );
}

export const describe = (d) => `${d.method}: ${d.models.map((m) => `${name(m.path)} ${Array.isArray(m.weight) ? m.weight.join("→") : m.weight ?? ""}`).join(", ")}${Object.entries(d.parameters ?? {}).map(([k, v]) => `, ${k} ${v}`).join("")}`;

/** The verdict on both pins, once they have answered the same questions. */
function Paired({ pins, setPins, questions }) {
  const [scores, set] = useState([]);
  const ask = useStream("/api/play", (e) => e.event === "score" && set((before) => Object.assign([...before], { [e.index]: e })));
  useEffect(() => { if (scores.length === 2 && !ask.running) setPins({ A: { ...pins.A, score: scores[0] }, B: { ...pins.B, score: scores[1] } }); }, [ask.running]);
  const [a, b] = [pins.A.score, pins.B.score], ready = a && b && a.mark === b.mark && a.count === b.count;
  if (!questions && !ready) return null;
  return (
    <Card title="A or B">
      {ready ? <Verdict left={a} right={b} names={["A", "B"]} /> : <p class="muted">They have not answered the same questions yet.</p>}
      {ask.running && <><Scored label="A" score={scores[0]} /><Scored label="B" score={scores[1]} /></>}
      {questions && <Button disabled={ask.running} onClick={() => { set([]); ask.start({ documents: [pins.A.document, pins.B.document], questions }); }}>{ask.running ? "Asking…" : ready ? "Ask both again" : "Ask both"}</Button>}
      <Failure error={ask.error} />
    </Card>
  );
}

/** A slider, or two where the value changes over depth. */
function Depth({ parameter: p, label, value, onInput, of = "" }) {
  const [low, high] = SPAN[p.name] ?? [p.low ?? 0, p.high ?? 2];
  const one = value ?? p.default ?? 1, deep = Array.isArray(one);
  const part = (text, i, v) => <Slider key={i} label={`${label}${text}`} help={p.help} min={low} max={high} value={v} onInput={(x) => onInput(deep ? (i ? [one[0], x] : [x, one.at(-1)]) : x)} />;
  return (
    <div class="depth">
      {deep ? [part(", first layer", 0, one[0]), part(", last layer", 1, one.at(-1))] : part("", 0, one)}
      <Check label="by depth" aria-label={`${label}${of} by depth`} checked={deep} onInput={(on) => onInput(on ? [one, one] : one[0])} />
    </div>
  );
}

export function Prompting({ prompt, set }) {
  const [text, write] = useState(prompt.text);
  const timer = useRef();
  const type = (t) => { write(t); clearTimeout(timer.current); timer.current = setTimeout(() => set((before) => ({ ...before, text: t })), 500); };
  return (
    <>
      <textarea aria-label="Prompt" rows="2" value={text} onInput={(e) => type(e.currentTarget.value)} />
      <div class="row prompt">
        <Slider label="Tokens" min={1} max={200} step={1} value={prompt.tokens} onInput={(tokens) => set({ ...prompt, tokens })} />
        <Slider label="Temperature" min={0} max={1.5} step={0.05} value={prompt.temperature} onInput={(temperature) => set({ ...prompt, temperature })} />
        <Check label="Chat template" checked={prompt.chat} onInput={(chat) => set({ ...prompt, chat })} />
      </div>
    </>
  );
}
export { PROMPT };
