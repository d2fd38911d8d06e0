import { useMemo, useState } from "preact/hooks";
import { go, keep, link, post, useGet, useWatch } from "../api.js";
import { Chart, HeatMap } from "../charts.jsx";
import { ago, name, number, percent, place, score } from "../format.js";
import { Badge, Busy, Button, Card, cell, Check, Failure, FamilyPicker, Note, Progress, Prose, Select, Table, useFamily, useItems } from "../ui.jsx";

export function Interference({ job }) {
  const models = useItems("checkpoint", "adapter");
  const { data: watched } = useWatch("/api/jobs/watch"), jobs = watched?.jobs;
  const [chosen, choose] = useFamily(8), { base, experts } = chosen;
  const [all, setAll] = useState(false), [error, fail] = useState();
  const past = jobs?.filter((j) => j.kind === "interference") ?? [], running = past.find((j) => ["starting", "running"].includes(j.status));
  const latest = past[0] && !running && past[0].status !== "done" ? past[0] : null;
  const shown = job ?? past.find((j) => j.status === "done")?.id;
  return (
    <>
      <div class="head"><div><h1>Interference</h1><p class="muted">Where experts of one base get in each other's way, and what to do about it.</p></div></div>
      <Card title="Models">
        <FamilyPicker items={models} chosen={chosen} onInput={choose} most={8} />
        <Check label="Measure every layer, which takes longer; otherwise four, evenly spread" checked={all} onInput={setAll} />
        <div class="row end"><Button kind="primary" disabled={!base || experts.length < 2 || !!running} onClick={() => { fail(); post("/api/jobs", { kind: "interference", values: { base, experts: named(experts), all } }).then(() => job && go("interference"), fail); }}>Measure</Button>
          {(!base || experts.length < 2) && <p class="muted">Choose a base and at least two experts.</p>}
          {past.length > 0 && <Select label="Earlier" value={shown} empty="Choose…" options={past.filter((j) => j.status === "done").map((j) => [j.id, `${j.title}, ${ago(j.created)}`])} onInput={(id) => go("interference", { job: id })} />}</div>
        <Failure error={error} />
        {running && <><Progress job={running} /><p class="muted" role="status">Measuring; <a href={link("jobs", { id: running.id })}>the job</a> continues when you leave this page.</p></>}
        {latest && <Note kind="warn">The last measurement {latest.status === "failed" ? `failed: ${latest.error}` : `was ${latest.status}`}. <a href={link("jobs", { id: latest.id })}>Open the job</a></Note>}
      </Card>
      {shown && <Survey job={jobs?.find((j) => j.id === shown)} id={shown} />}
    </>
  );
}
const named = (paths) => {
  const found = {};
  for (const p of paths) { let n = name(p).replace(/[^\w.-]/g, "-"); while (found[n]) n += "-2"; found[n] = p; }
  return found;
};

/** The interference of two unrelated experts in a matrix: k/√(d·m) at rank k. */
const chance = (m) => m.rank / Math.sqrt(m.shape[0] * m.shape[1]) || 1e-9;

/** The base and the experts by name, from the words of the command. */
const sources = (job) => {
  const words = job?.arguments ?? [];
  const at = words.indexOf("--base");
  return { base: words[at + 1], experts: Object.fromEntries(words.slice(1, at).map((w) => [w.slice(0, w.indexOf("=")), w.slice(w.indexOf("=") + 1)])) };
};

function Survey({ job, id }) {
  const { data, error } = useGet(`/api/jobs/${id}/result`);
  const [picked, pick] = useState(null);
  const pairs = useMemo(() => data?.experts.flatMap((a, i) => data.experts.slice(i + 1).map((b, j) => [i, i + 1 + j, `${a} – ${b}`])) ?? [], [data]);
  const blocks = useMemo(() => data?.blocks.map((b) => ({ ...b, inside: data.matrices.filter((m) => m.block === b.block) })) ?? [], [data]);
  if (error) return <Failure error={error} />;
  if (!data) return <Busy />;
  const level = (b, [i, j]) => { const v = b.inside.map((m) => m.pairs[i][j] / chance(m)); return v.length ? v.reduce((x, y) => x + y, 0) / v.length : null; };
  const { base, experts } = sources(job);
  const advised = (method) => { keep("draft", { document: { method, base, models: Object.values(experts).map((path) => ({ path })), parameters: method === "task_arithmetic" ? {} : { scale: 1 } } }); go("recipe"); };
  const methods = (text) => ["task_arithmetic", "tsv", "iso_c"].filter((m) => new RegExp(`\\b${m}\\b`).test(text));
  if (!data.matrices.length) return <Note>No matrix differs from the base: nothing can interfere.</Note>;
  return (
    <>
      <Card title="Advice"><ul class="plain">{data.advice.map((a) => (
        <li key={a.text}><Badge kind={a.kind === "opposed" || a.kind === "collision" ? "warn" : "info"}>{a.kind}</Badge> <Prose text={a.text} /> {a.kind === "method" && methods(a.text).map((m) => <Button key={m} kind="small" onClick={() => advised(m)}>Recipe with {m}</Button>)}</li>))}</ul></Card>
      <Card title="Layers × pairs">
        {Object.entries(data.layers ?? {}).map(([stack, [measured, total]]) => <p key={stack} class="muted">{measured.length} of {total} layers of {stack} were measured.</p>)}
        <HeatMap title="Interference of two experts in a layer, as a multiple of what unrelated experts have, on a logarithmic scale. Pick a cell for its matrices." rows={blocks.map((b) => place(`${b.block}.x`)[0].split(".").pop() || b.block)} columns={pairs.map((p) => p[2])} low={1} log
          values={blocks.map((b) => pairs.map((p) => level(b, p)))} format={(v) => `${v.toPrecision(3)}× chance`} onPick={(i, j) => pick({ block: blocks[i], pair: pairs[j] })} />
      </Card>
      {picked && <Detail picked={picked} base={base} experts={experts} fractions={data.fractions} names={data.experts} />}
      <Card title="How alike they are"><HeatMap title="Cosine of whole task vectors" rows={data.experts} columns={data.experts} values={data.cosine} low={0} high={1} cell={32} format={score} /></Card>
    </>
  );
}

function Detail({ picked: { block, pair }, base, experts, fractions, names }) {
  const [overlap, set] = useState();
  const [error, fail] = useState();
  const look = (matrix) => { fail(); set({ matrix }); post("/api/overlap", { base, experts: Object.fromEntries([pair[0], pair[1]].map((i) => [names[i], experts[names[i]]])), matrix }).then(set, fail); };
  const mean = (t) => fractions.map((_, k) => block.inside.reduce((a, m) => a + m.energy_curve[t][k], 0) / block.inside.length);
  return (
    <Card title={`${block.block}: ${pair[2]}`}>
      <Table caption="Matrices of the layer" columns={["matrix", "interference", "× chance", "effective ranks", "overlap"]} rows={block.inside.map((m) => [
        m.name, cell(m.pairs[pair[0]][pair[1]], number(m.pairs[pair[0]][pair[1]])), cell(m.pairs[pair[0]][pair[1]] / chance(m), number(m.pairs[pair[0]][pair[1]] / chance(m))), [pair[0], pair[1]].map((t) => number(m.effective_rank[t])).join(", "),
        <Button kind="small" aria-label={`Overlap of ${m.name}`} onClick={() => look(m.name)}>Show</Button>])} />
      <Chart title="Energy kept by a share of the components" x="share of the components" y="energy kept, mean over the layer" format={(v) => percent(v, 1)} series={[pair[0], pair[1]].map((t) => ({ name: names[t], x: fractions, y: mean(t) }))} />
      <Failure error={error} />
      {overlap?.overlap ? <HeatMap title={`|UᵀU| of ${overlap.matrix}: off the diagonal blocks is what the experts share`} rows={overlap.overlap.map((_, i) => String(i))} columns={overlap.overlap.map((_, i) => String(i))} labels={false} values={overlap.overlap} low={0} high={1} cell={8} square /> : overlap && !error && <Busy>Decomposing {overlap.matrix}…</Busy>}
    </Card>
  );
}
