import { useEffect, useState } from "preact/hooks";
import { useStream } from "../api.js";
import { Chart, HeatMap } from "../charts.jsx";
import { name, number, score } from "../format.js";
import { alike, Button, Card, Failure, family, Field, Note, Select, Slider, useItems } from "../ui.jsx";

const linear = (weights) => ({ method: "linear", models: Object.entries(weights).map(([path, weight]) => ({ path, weight })) });
const steps = (n, low = 0, high = 1) => Array.from({ length: n }, (_, i) => low + ((high - low) * i) / (n - 1));

export function Landscape() {
  const items = useItems("checkpoint").filter((i) => i.facts.live), paths = items.map((i) => i.path);
  const [a, setA] = useState(""), [b, setB] = useState(""), [aligned, setAligned] = useState(""), [c, setC] = useState("");
  useEffect(() => { family().then(({ base, models }) => { if (base) { setA((now) => now || base); setB((now) => now || models[0]); } }, () => {}); }, []);
  const at = (path) => items.find((i) => i.path === path);
  const kin = paths.filter((p) => p !== a && alike(at(p), at(a)));
  const [points, setPoints] = useState(9), [text, write] = useState("");
  const [shown, show] = useState(null), [losses, set] = useState([]);
  const play = useStream("/api/play", (e) => e.event === "loss" && set((before) => { const found = [...before]; found[e.index] = e.loss; return found; }));
  const side = points < 7 ? 5 : points < 13 ? 7 : 11; // the models lie on points of the grid
  const run = (plane) => {
    const ends = [b, ...(aligned ? [aligned] : [])], xs = steps(points), grid = steps(side, -1 / (side - 3), 1 + 1 / (side - 3));
    const documents = plane
      ? ends.flatMap((end) => [...grid].reverse().flatMap((y) => grid.map((x) => linear({ [a]: 1 - x - y, [end]: x, [c]: y }))))
      : ends.flatMap((end) => xs.map((x) => linear({ [a]: 1 - x, [end]: x })));
    set([]); show({ plane, a, b, c, ends, xs, grid });
    play.start({ documents, texts: text.trim() ? [text] : [], builtin: !text.trim() });
  };
  const lines = shown && !shown.plane ? shown.ends.map((end, k) => ({ end, y: shown.xs.map((_, i) => losses[k * shown.xs.length + i] ?? null) })) : [];
  return (
    <>
      <div class="head"><div><h1>Landscape</h1><p class="muted">The loss on the way from one model to another, and over the plane of three.</p></div></div>
      {paths.length < 2 && <Note>This needs two language models of one architecture in the folder.</Note>}
      <Card title="Models">
        <div class="row"><Select label="From" value={a} empty="Choose…" options={paths} onInput={(p) => { setA(p); for (const [v, set] of [[b, setB], [aligned, setAligned], [c, setC]]) if (v === p || !alike(at(v), at(p))) set(""); }} /><Select label="To" value={b} empty="Choose…" options={kin} onInput={setB} />
          <Select label="The same, aligned" help="A copy of the second whose units were matched to the first" value={aligned} empty="None" options={kin} onInput={setAligned} /><Select label="Third, for a plane" value={c} empty="None" options={kin} onInput={setC} /></div>
        <Slider label="Points" min={3} max={21} step={1} value={points} onInput={(v) => setPoints(Math.max(3, Math.min(21, Math.round(v))))} />
        <Field label="Text to score" help="Empty: a few built-in texts">{(id) => <textarea id={id} rows="2" value={text} onInput={(e) => write(e.currentTarget.value)} />}</Field>
        <div class="row"><Button kind="primary" disabled={!a || !b || a === b} onClick={() => run(false)}>Draw the line</Button><Button disabled={new Set([a, b, c].filter(Boolean)).size < 3} onClick={() => run(true)}>Draw the plane, {side} × {side}</Button>{play.running && <Button onClick={play.stop}>Stop</Button>}</div>
        <Failure error={play.error} />
      </Card>
      {lines.length > 0 && <Card title={`From ${name(shown.a)} to ${name(shown.b)}`}>
        <Chart title="Loss along the line" x="share of the second model" y="loss per token, nats" series={lines.map((l) => ({ name: `to ${name(l.end)}`, x: shown.xs, y: l.y }))} format={score} />
        {lines.map((l) => <Barrier key={l.end} {...l} />)}
      </Card>}
      {shown?.plane && <div class={shown.ends.length > 1 ? "columns even" : ""}>{shown.ends.map((end, k) => <Card key={end} title={shown.ends.length > 1 ? `Plane, ${k ? "aligned" : "as they are"}` : "Plane"}>
        <Plane {...shown} b={end} losses={losses.slice(k * shown.grid.length ** 2, (k + 1) * shown.grid.length ** 2)} all={losses} />
      </Card>)}</div>}
    </>
  );
}

/** A plane through three models, y upwards; two planes share their colours. */
const Plane = ({ a, b, c, grid, losses, all }) => {
  const sound = all.filter((v) => v != null), ticks = grid.map((v) => number(v, 4)), side = grid.length, top = side - 2;
  return <HeatMap title={`Loss per token, nats. A is ${name(a)}, B ${name(b)}, C ${name(c)}; across the share of B, upwards that of C`} rows={[...ticks].reverse()} columns={ticks} cell={56} square low={Math.min(...sound)} high={Math.max(...sound)}
    marks={[[top, 1, "A"], [top, top, "B"], [1, 1, "C"]]} values={grid.map((_, i) => grid.map((_, j) => losses[i * side + j] ?? null))} format={score} />;
};
/** The barrier above the chord: max over the line of L(x) − (1 − x) L(0) − x L(1). */
const Barrier = ({ end, y }) => {
  if (y.some((v) => v == null)) return null;
  const last = y.length - 1, height = Math.max(...y.map((v, i) => v - (y[0] * (last - i) + y[last] * i) / last));
  return <Note kind={height > 0.1 ? "warn" : "good"}>Barrier to {name(end)}: {height > 1e-9 ? `the loss rises up to ${number(height)} nats above the straight line between both ends` : "none, the loss stays below the straight line between both ends"}{height > 0.1 ? ". If the two were trained apart, merganser align may lower it." : ": the two can be averaged."}</Note>;
};
