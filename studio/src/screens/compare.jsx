import { useEffect, useState } from "preact/hooks";
import { kept, useKept, useStream } from "../api.js";
import { HeatMap } from "../charts.jsx";
import { number, score } from "../format.js";
import { useSchema } from "../schema.js";
import { alike, Busy, Button, Card, Check, Failure, family, Note, Picker, Select, TextField, useItems } from "../ui.jsx";
import { Asking, Scored, useQuestions, Verdict } from "../questions.jsx";
import { describe, PROMPT, Prompting } from "./mixer.jsx";
import { MethodChoice } from "./recipe.jsx";

const alone = (path) => ({ method: "passthrough", models: [{ path }] });
const collect = (before, e) => {
  const found = [...before], o = found[e.index] ?? { text: "" };
  found[e.index] = e.event === "token" ? { ...o, text: o.text + e.text } : e.event === "likelihood" ? { ...o, tokens: e.tokens } : e.event === "loss" ? { ...o, loss: e.loss } : e.event === "classes" ? { ...o, classes: e.classes } : e.event === "score" ? { ...o, score: e } : e.event === "end" ? { ...o, done: true } : o;
  return found;
};
const shuffled = (list) => list.map((v) => [Math.random(), v]).sort((a, b) => a[0] - b[0]).map(([, v]) => v);

export function Compare() {
  const items = useItems("checkpoint", "adapter").filter((i) => i.facts.live || i.kind === "adapter");
  const [chosen, choose] = useKept("compared", []);
  const [pins] = useState(() => kept("compare", []));
  const [prompt, setPrompt] = useKept("prompt", PROMPT);
  const [view, setView] = useState("side");
  return (
    <>
      <div class="head"><div><h1>Compare</h1><p class="muted">One prompt or a file of questions, several models, one after the other in the same memory.</p></div>
        <div class="row" role="group" aria-label="View"><Button kind={view === "side" ? "primary" : ""} aria-pressed={view === "side"} onClick={() => setView("side")}>Side by side</Button><Button kind={view === "grid" ? "primary" : ""} aria-pressed={view === "grid"} onClick={() => setView("grid")}>X/Y grid</Button></div></div>
      <Card title="Prompt"><Prompting prompt={prompt} set={setPrompt} /></Card>
      {view === "side" ? <Side items={items} chosen={chosen} choose={choose} pins={pins} prompt={prompt} /> : <Grid items={items} prompt={prompt} />}
    </>
  );
}

function Side({ items, chosen, choose, pins, prompt }) {
  const [blind, setBlind] = useState(false);
  const [order, setOrder] = useState([]), [asking, setAsking] = useState("");
  const [found, set] = useState([]);
  const [votes, setVotes] = useKept("votes", {});
  const [voted, setVoted] = useState(false);
  const [questions, asked, ask] = useQuestions();
  const play = useStream("/api/play", (e) => set((before) => collect(before, e)));
  const models = [...pins.map((p) => ({ label: p.label, document: p.document })), ...chosen.map((p) => ({ label: p, document: alone(p) }))];
  const run = () => {
    const now = blind ? shuffled(models) : models;
    setOrder(now); setAsking(prompt.text); set([]); setVoted(false);
    play.start({ documents: now.map((m) => m.document), prompt, compare: true, questions });
  };
  const vote = (label) => { setVoted(true); if (label) setVotes({ ...votes, [label]: (votes[label] ?? 0) + 1 }); };
  const reference = found[0]?.tokens;
  const done = order.length > 0 && found.filter((f) => f?.done).length === order.length;
  return (
    <>
      <Card title="Models">
        {pins.length > 0 && <Note>From the mixer: {pins.map((p) => `${p.label} (${describe(p.document)})`).join("; ")}</Note>}
        <Picker label="Checkpoints" items={items} chosen={chosen} onInput={choose} most={6} />
        <Asking chosen={asked} set={ask} />
        <div class="row"><Check label="Blind: hide which is which until you have voted" checked={blind} onInput={setBlind} />
          <Button kind="primary" disabled={models.length < 1} onClick={run}>{play.running ? "Start again" : "Ask all"}</Button>{play.running && <Button onClick={play.stop}>Stop</Button>}{!models.length && <span class="muted">Choose at least one model.</span>}</div>
        <Failure error={play.error} />
      </Card>
      {order.length > 0 && <div class="sides">{order.map((m, i) => (
        <Card key={`${m.label}${i}`} title={blind && !voted ? `Model ${i + 1}` : m.label}>
          <p class="said"><span class="muted">{asking}</span>{found[i]?.text}{play.running && !found[i]?.done && <span class="caret" aria-hidden="true" />}</p>
          {found[i]?.tokens && <details open={!blind}><summary>{i === 0 ? "How sure it is of its own words" : `The words of ${blind && !voted ? "model 1" : order[0].label}, by this model`}</summary>
            <p class="tokens">{found[i].tokens.map(([t, p], k) => <Token key={k} text={t} own={p} first={i ? reference?.[k]?.[1] : undefined} />)}</p>
            <p class="muted">mean log-probability {signed(mean(found[i].tokens))} nats per token{i > 0 && reference ? `, ${signed(mean(found[i].tokens) - mean(reference))} compared with ${blind && !voted ? "model 1" : order[0].label}` : ""}</p></details>}
          {found[i]?.classes && <ul class="plain">{found[i].classes.slice(0, 5).map(([c, p]) => <li key={c} class="bar-row"><span>{c}</span><span class="bar"><i style={{ width: `${100 * p}%` }} /></span><span class="num">{number(p)}</span></li>)}</ul>}
          <Scored score={found[i]?.score} />
          {i > 0 && (!blind || voted) && <Verdict left={found[i]?.score} right={found[0]?.score} names={[m.label, order[0].label]} />}
          {blind && done && !voted && <Button kind="primary" onClick={() => vote(m.label)}>This is the best</Button>}
        </Card>))}</div>}
      {blind && done && !voted && <Button onClick={() => vote(null)}>Cannot tell</Button>}
      {Object.keys(votes).length > 0 && <Card title="Votes" actions={<Button kind="small" onClick={() => setVotes({})}>Start over</Button>}>
        <Tally votes={votes} /></Card>}
    </>
  );
}
const mean = (tokens) => { const v = tokens.map((t) => t[1]).filter((x) => x != null); return v.reduce((a, b) => a + b, 0) / Math.max(1, v.length); };
const signed = (x) => `${x >= 0 ? "+" : "−"}${number(Math.abs(x))}`;

/** Underlined the more, the less a model expects a token (or the less than the first model does). */
const Token = ({ text, own, first }) => {
  const change = first == null ? own : own - first;
  const level = change == null ? 0 : Math.min(4, Math.floor(Math.abs(change)));
  return <span class={`token l${level} ${change > 0 ? "up" : "down"}`} title={own == null ? "" : `log p ${number(own)}${first == null ? "" : `, first model ${number(first)}`}`}>{text}</span>;
};

function Tally({ votes }) {
  const rows = Object.entries(votes).sort((a, b) => b[1] - a[1]), n = rows.reduce((a, [, v]) => a + v, 0);
  // Two-sided sign test of the first against the second.
  const [a, b] = [rows[0][1], rows[1]?.[1] ?? 0], m = a + b;
  let tail = 0, c = 1;
  for (let k = 0; k <= m; k++) { if (k >= a) tail += c; c = (c * (m - k)) / (k + 1); }
  const p = Math.min(1, (2 * tail) / 2 ** m);
  return (
    <>
      <ul class="plain">{rows.map(([label, v]) => <li key={label} class="bar-row"><span>{label}</span><span class="bar"><i style={{ width: `${(100 * v) / n}%` }} /></span><span class="num">{v}</span></li>)}</ul>
      <Note kind={p < 0.05 ? "good" : ""}>{p < 0.05 ? `${rows[0][0]} is preferred (sign test, p = ${number(p, 2)}).` : `Cannot tell with ${n} vote${n > 1 ? "s" : ""}.`}</Note>
    </>
  );
}

/** What an axis can be: the weight of a model, or a number that all models share. */
const axes = (method, models) => [
  ...(method?.parameters ?? []).filter((p) => p.per_model && p.kind === "number").flatMap((p) => models.map((m) => [`${p.name} of ${m}`, (d, v) => ({ ...d, models: d.models.map((e) => (e.path === m ? { ...e, [p.name]: v } : e)) })])),
  ...(method?.parameters ?? []).filter((p) => !p.per_model && p.kind === "number").map((p) => [p.name, (d, v) => ({ ...d, parameters: { ...d.parameters, [p.name]: v } })]),
];
const numbers = (text) => text.split(/[\s,]+/).filter(Boolean).map(Number).filter((x) => Number.isFinite(x)).slice(0, 7);

function Grid({ items, prompt }) {
  const { methods: all, error } = useSchema();
  const methods = all?.filter((m) => !m.statistics.length && m.reach !== "whole");
  const [kept, set] = useKept("grid", { method: "task_arithmetic", base: "", models: [], x: "", y: "", xs: "0, 0.5, 1", ys: "0, 0.5, 1" });
  const [found, collectAll] = useState([]), [shown, show] = useState(null);
  useEffect(() => { if (!kept.base && !kept.models.length) family().then(({ base, models }) => base && set((g) => (g.base || g.models.length ? g : { ...g, base, models: models.slice(0, 2) })), () => {}); }, []);
  const play = useStream("/api/play", (e) => collectAll((before) => collect(before, e)));
  const paths = items.map((i) => i.path), method = methods?.find((m) => m.name === kept.method);
  const known = axes(method, kept.models), names = known.map(([n]) => n), put = (values) => set({ ...given, ...values });
  const axis = (chosen, other) => (names.includes(chosen) ? chosen : names.find((n) => n !== other) ?? "");
  const x = axis(kept.x, kept.y), given = { ...kept, x, y: axis(kept.y, x) };
  const [xs, ys] = [numbers(given.xs), numbers(given.ys)];
  const ready = given.models.length && names.includes(given.x) && names.includes(given.y) && given.x !== given.y && xs.length && ys.length && (method?.needs !== "required" || given.base);
  const run = () => {
    const start = { method: given.method, ...(given.base && method.needs !== "none" ? { base: given.base } : {}), models: given.models.map((path) => ({ path })) };
    const [, setX] = known.find(([n]) => n === given.x), [, setY] = known.find(([n]) => n === given.y);
    collectAll([]); show({ x: given.x, y: given.y, xs, ys });
    play.start({ documents: ys.flatMap((y) => xs.map((x) => setY(setX(start, x), y))), prompt, builtin: true });
  };
  const losses = found.map((f) => f?.loss).filter((l) => l != null).map(Math.exp);
  const at = (i, j) => found[i * shown.xs.length + j];
  if (error) return <Failure error={error} />;
  if (!methods) return <Busy />;
  return (
    <>
      <Card title="Grid">
        <div class="row"><MethodChoice methods={methods} value={given.method} onInput={(m) => put({ method: m })} />{method?.needs !== "none" && <Select label="Base" value={given.base} empty="None" options={paths} onInput={(base) => put({ base, models: given.models.filter((m) => m !== base && alike(items.find((i) => i.path === m), items.find((i) => i.path === base))) })} />}</div>
        <Picker label="Models" items={items.filter((i) => i.path !== given.base)} chosen={given.models} onInput={(models) => put({ models })} />
        <div class="row"><Select label="Across" value={given.x} empty="Choose…" options={names} onInput={(x) => put({ x })} /><TextField label="Values across" value={given.xs} onInput={(v) => put({ xs: v })} />
          <Select label="Down" value={given.y} empty="Choose…" options={names} onInput={(y) => put({ y })} /><TextField label="Values down" value={given.ys} onInput={(v) => put({ ys: v })} /></div>
        <div class="row"><Button kind="primary" disabled={!ready} onClick={run}>Fill the grid</Button>{!ready && <p class="muted">Choose models{method?.needs === "required" ? ", a base" : ""} and two different parameters.</p>}{play.running && <Button onClick={play.stop}>Stop</Button>}</div>
        <Failure error={play.error} />
      </Card>
      {shown && <Card title="What each says">
        <HeatMap log title={`Perplexity on built-in texts, on a logarithmic scale; ${shown.x} across, ${shown.y} down`} rows={shown.ys.map(String)} columns={shown.xs.map(String)} cell={32} low={losses.length ? Math.min(...losses) : 0}
          values={shown.ys.map((_, i) => shown.xs.map((_, j) => (at(i, j)?.loss == null ? null : Math.exp(at(i, j).loss))))} format={score} />
        <div class="scroll" tabindex="0" role="region" aria-label="Texts over the grid"><table class="grid-table"><thead><tr><th scope="col"><span class="hidden">{shown.y} down, {shown.x} across</span></th>{shown.xs.map((x) => <th key={x} scope="col">{x}</th>)}</tr></thead>
          <tbody>{shown.ys.map((y, i) => <tr key={y}><th scope="row">{y}</th>{shown.xs.map((x, j) => <td key={x}>{at(i, j)?.text}{at(i, j)?.loss != null && <small class="muted"> ({score(Math.exp(at(i, j).loss))})</small>}</td>)}</tr>)}</tbody></table></div>
      </Card>}
    </>
  );
}
