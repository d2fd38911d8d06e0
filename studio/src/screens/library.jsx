import { useState } from "preact/hooks";
import { go, post, query, useGet } from "../api.js";
import { Chart, HeatMap } from "../charts.jsx";
import { bytes, ends, name, number, percent } from "../format.js";
import { Badge, Busy, Button, Card, cell, Failure, FamilyPicker, Note, Select, Slider, Table, TextField, useFamily, useItems } from "../ui.jsx";

export function Library({ path }) {
  const libraries = useItems("library");
  const { data, error } = useGet(path && query("/api/library", { path }));
  return (
    <>
      <div class="head"><div><h1>{path ?? "Library"}</h1><p class="muted">Many experts of one base, each a small file of low-rank factors.</p></div>
        <Select label="Library" value={path} empty="Build a new one" options={libraries.map((l) => l.path)} onInput={(p) => go("library", p ? { path: p } : {})} /></div>
      <Failure error={error} />
      {path ? data ? <Shown data={data} path={path} /> : !error && <Busy /> : <Build />}
    </>
  );
}

function Build() {
  const models = useItems("checkpoint");
  const [chosen, choose] = useFamily(64), { base, experts } = chosen;
  const [out, setOut] = useState("library");
  const [error, fail] = useState();
  const start = () => { fail(); post("/api/jobs", { kind: "library", values: { base, out, experts: Object.fromEntries(experts.map((p) => [name(p), p])) } }).then((j) => go("jobs", { id: j.id }), fail); };
  return (
    <Card title="Build a library">
      <FamilyPicker items={models} chosen={chosen} onInput={choose} most={64} />
      <div class="row end"><TextField label="Directory" value={out} onInput={setOut} /><Button kind="primary" disabled={!base || !experts.length} onClick={start}>Build</Button></div>
      {(!base || !experts.length) && <p class="muted">Choose a base and the experts that were fine-tuned from it.</p>}
      <Failure error={error} />
    </Card>
  );
}

function Shown({ data, path }) {
  const total = data.experts.reduce((a, e) => a + e.bytes, 0);
  const { data: budgets, error } = useGet(query("/api/library/budgets", { path }));
  return (
    <>
      <div class="tiles">
        <div class="tile"><span class="muted">Experts</span><strong>{data.experts.length}</strong></div>
        <div class="tile"><span class="muted">Their files</span><strong>{bytes(total)}</strong></div>
        <div class="tile"><span class="muted">With the base</span><strong>{number(data.ratio)}× its size</strong></div>
        <div class="tile"><span class="muted">Ranks chosen by</span><strong>{data.policy.kind} {data.policy.kind === "budget" ? bytes(data.policy.value) : number(data.policy.value)}</strong></div>
      </div>
      <Card title="Experts"><Table caption="Experts" columns={["expert", "size", "energy kept", "made from"]} rows={data.experts.map((e) => [e.name, cell(e.bytes, bytes(e.bytes)), cell(e.energy, percent(e.energy, 1)), e.source])} /></Card>
      {!budgets ? <Card title="A smaller budget">{error ? <Failure error={error} /> : <Busy>Reading the factors of all experts…</Busy>}</Card>
        : budgets.length > 1 ? <Budget data={data} points={budgets} path={path} />
        : <Card title="A smaller budget"><Note>The experts are stored in codes, and a smaller budget may take other codes altogether: what it loses is known once it is built, with <code>merganser library build --budget</code>.</Note></Card>}
      <Routing path={path} experts={data.experts} />
    </>
  );
}

function Budget({ data, points, path }) {
  const names = data.experts.map((e) => e.name);
  const [at, set] = useState(Math.floor(points.length / 2));
  const [out, setOut] = useState(`${path}-small`);
  const [error, fail] = useState();
  const now = points[at];
  const build = () => { fail(); post("/api/jobs", { kind: "library", values: { base: data.base, out, budget: now.bytes, experts: Object.fromEntries(data.experts.map((e) => [e.name, e.source])) } }).then((j) => go("jobs", { id: j.id }), fail); };
  return (
    <Card title="A smaller budget">
      <Slider label="Budget" bare min={0} max={points.length - 1} step={1} value={at} onInput={(v) => set(Math.max(0, Math.min(points.length - 1, Math.round(v))))} />
      <p><strong>{bytes(now.bytes)}</strong> for all experts. Predicted loss of energy: {names.map((n) => `${n} ${percent(1 - now.energy[n], 1)}`).join(", ")}.</p>
      <Chart log title="Energy lost by the size of the library" x="MiB of all expert files" y="energy lost" mark={now.bytes / 2 ** 20} format={(v) => `${number(100 * v, 2)} %`} series={names.map((n) => ({ name: n, x: points.map((p) => p.bytes / 2 ** 20), y: points.map((p) => 1 - p.energy[n]), dots: false }))} />
      <div class="row end"><TextField label="Build again into" value={out} onInput={setOut} /><Button onClick={build}>Build with {bytes(now.bytes)}</Button></div>
      <Failure error={error} />
    </Card>
  );
}

function Routing({ path, experts }) {
  const [text, write] = useState("");
  const [found, set] = useState(), [error, fail] = useState(), [busy, wait] = useState(false);
  const ask = async (event) => { event.preventDefault(); fail(); wait(true); try { set(await post("/api/route", { path, text })); } catch (problem) { fail(problem); } wait(false); };
  return (
    <Card title="Which experts fire">
      <form onSubmit={ask} class="row end"><TextField label="A sentence" value={text} onInput={write} /><button class="button primary" disabled={!text.trim() || busy}>{busy ? "Routing…" : "Route"}</button></form>
      <Failure error={error} />
      {found && <>
        <ul class="plain">{Object.entries(found.weights).sort((a, b) => b[1] - a[1]).map(([e, w]) => (
          <li key={e} class="bar-row"><span>{e} {found.chosen.includes(e) && <Badge kind="good">fires</Badge>}</span><span class="bar"><i style={{ width: `${100 * w}%` }} /></span><span class="num">{number(w)}</span></li>))}</ul>
        <Note>{found.fallback ? "No expert reached the threshold, so the best one was taken. " : ""}An expert fires if its weight is at least {number(found.threshold)} and it is among the best {found.top}. It weighs the more, the larger the share of a layer's input that lies in the directions it has learned there:</Note>
        <Why explained={found.explained} names={experts.map((e) => e.name)} />
      </>}
      {!experts.length && <Note>The library has no experts.</Note>}
    </Card>
  );
}

/** The share of each layer's input that each expert explains. */
function Why({ explained, names }) {
  const layers = Object.keys(explained);
  if (!layers.length) return null;
  const values = layers.map((l) => names.map((n) => explained[l][n] ?? null));
  return <HeatMap title="Share of the input explained, layers downwards" rows={ends(layers)} columns={names} values={values} low={Math.min(...values.flat().filter((v) => v != null))} cell={22} format={(v) => percent(v, 2)} />;
}
