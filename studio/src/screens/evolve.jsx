import { useState } from "preact/hooks";
import { go, post, query, useWatch } from "../api.js";
import { Chart, Parallel } from "../charts.jsx";
import { duration, number, score } from "../format.js";
import { Badge, Busy, Button, Card, cell, Failure, Interval, Note, Select, Table, TextField, useItems } from "../ui.jsx";

export function Evolve({ path }) {
  const studies = useItems("study"), runs = useItems("run");
  const [error, fail] = useState();
  const study = path?.endsWith(".sqlite") ? path : undefined;
  const [chosen, setRun] = useState(path && !study ? path : ""), run = chosen || (runs.length === 1 ? runs[0].path : "");
  return (
    <>
      <div class="head"><div><h1>Evolve</h1><p class="muted">Search for the weights of a merge, and follow the trials as they run.</p></div>
        <Select label="Study" value={study} empty="Choose…" options={studies.map((s) => s.path)} onInput={(p) => go("evolve", { path: p })} /></div>
      {runs.length > 0 && <Card title="Start a search"><div class="row end"><Select label="Run file" value={run} empty="Choose…" options={runs.map((r) => r.path)} onInput={setRun} />
        <Button kind="primary" disabled={!run} onClick={() => { fail(); post("/api/jobs", { kind: "evolve", values: { path: run } }).then((j) => go("jobs", { id: j.id }), fail); }}>Run</Button></div><Failure error={error} /></Card>}
      {study ? <Study path={study} /> : !studies.length && !runs.length && <Note>No studies in this folder. Write a run file with <code>merganser evolve init</code>, put it into this folder and start it here.</Note>}
    </>
  );
}

function Study({ path }) {
  const { data: s, error } = useWatch(query("/api/study/watch", { path }));
  const [out, setOut] = useState("winner.yml");
  const [problem, fail] = useState();
  if (!s) return error ? <Failure error={error} /> : <Busy />;
  const valid = s.trials.filter((t) => t.valid), names = s.objectives.map((o) => o.name), first = names[0];
  const index = new Map(s.trials.map((t, i) => [t.label, i + 1]));
  const best = [];
  for (const t of valid) { const v = t.objectives[first], last = best.at(-1)?.[1]; best.push([index.get(t.label), last == null ? v : s.objectives[0].maximize ? Math.max(last, v) : Math.min(last, v)]); }
  const onFront = new Set(s.front);
  return (
    <>
      <div class="tiles">
        <div class="tile"><span class="muted">Trials</span><strong>{s.trials.length} of {s.total}</strong><div class="meter" aria-hidden="true"><i style={{ width: `${(100 * s.trials.length) / s.total}%` }} /></div></div>
        <div class="tile"><span class="muted">State</span><strong>{s.failure ? "failed" : s.ended ? "ended" : s.running ? "running" : "not finished"}</strong></div>
        {s.running && s.seconds_left != null && <div class="tile"><span class="muted">Left, about</span><strong>{duration(s.seconds_left)}</strong></div>}
        <div class="tile"><span class="muted">Failed</span><strong>{s.trials.filter((t) => t.state === "failed").length}</strong></div>
      </div>
      {s.failure && <Note kind="bad">{s.failure}</Note>}
      {!s.failure && !s.ended && !s.running && <Note kind="warn">No process runs this search. It continues where it stopped when you run its run file again.</Note>}
      {valid.length > 0 && <>
        <Card title={s.winners.length > 1 ? "Front" : s.ended ? "Winner" : "Best so far"}>
          {s.winners.map((w) => (
            <div key={w.label} class="winner">
              <p><Badge kind="good">trial {w.place}</Badge> estimated {names.map((n) => `${n} ${score(w.objectives[n])}`).join(", ")}</p>
              {Object.entries(w.unseen).map(([m, i]) => <Interval key={m} label={`${m}, unseen items`} {...i} scale={i.low < 0 || i.high > 1 ? [Math.min(0, i.low), 1.1 * i.high] : undefined} />)}
              <p class="muted">{Object.entries(w.values).map(([k, v]) => `${k} = ${typeof v === "number" ? number(v, 4) : v}`).join(", ")}</p>
            </div>))}
          {s.verdicts.map((v) => <Note key={v}>{v}</Note>)}
          <div class="row end"><TextField label="Write the winner's recipe to" value={out} onInput={setOut} /><Button kind="primary" onClick={() => { fail(); post("/api/jobs", { kind: "export", values: { path, out, trial: s.winners[0].place } }).then((j) => go("jobs", { id: j.id }), fail); }}>Export</Button></div>
          <Failure error={problem} />
        </Card>
        <Card title="Trials over time"><Chart title="Estimated score of every trial" x="trial" y={first} series={[{ name: "best so far", x: best.map((b) => b[0]), y: best.map((b) => b[1]), dots: false }, { name: "trials", x: valid.map((t) => index.get(t.label)), y: valid.map((t) => t.objectives[first]), labels: valid.map((t) => t.place), line: false, faint: true }]} /></Card>
        {names.length > 1 && <Card title="Pareto front"><Chart title="Two objectives" x={names[0]} y={names[1]} series={[{ name: "front", x: front(valid, onFront).map((t) => t.objectives[names[0]]), y: front(valid, onFront).map((t) => t.objectives[names[1]]) }, { name: "tried", line: false, faint: true, x: valid.map((t) => t.objectives[names[0]]), y: valid.map((t) => t.objectives[names[1]]) }]} /></Card>}
        {s.variables.length > 1 && <Card title="What was searched"><Parallel title={`Each line a trial, the stronger the better its ${first}`} names={s.variables} rows={valid.map((t) => s.variables.map((v) => t.values[v]))} scores={valid.map((t) => (s.objectives[0].maximize ? 1 : -1) * t.objectives[first])} /></Card>}
      </>}
      <Card title="Every trial"><Table caption="Trials" columns={["trial", "state", ...names, ...s.variables, "seconds"]} rows={s.trials.map((t) => [t.place, t.error ? `${t.state}: ${t.error}` : t.state, ...names.map((n) => cell(t.objectives[n] ?? -Infinity, score(t.objectives[n]))), ...s.variables.map((v) => (typeof t.values[v] === "number" ? cell(t.values[v], score(t.values[v])) : t.values[v])), cell(t.seconds, t.seconds < 0.1 ? "< 0.1" : number(t.seconds, 3))])} /></Card>
    </>
  );
}
const front = (valid, on) => valid.filter((t) => on.has(t.label)).sort((a, b) => Object.values(a.objectives)[0] - Object.values(b.objectives)[0]);
