import { useEffect, useMemo, useState } from "preact/hooks";
import { get, go, keep, link, post, query, useGet, useStream } from "../api.js";
import { Chart, HeatMap } from "../charts.jsx";
import { bytes, count, number, percent, place } from "../format.js";
import { Badge, Busy, Button, Card, cell, Failure, Note, Select, Table, useItems } from "../ui.jsx";

export function Checkpoint({ path, other }) {
  const models = useItems("checkpoint", "adapter");
  const { data, error } = useGet(path && query("/api/checkpoint", { path }));
  return (
    <>
      <div class="head"><div><h1>{path ? other ? `${path} and ${other}` : path : "Checkpoint"}</h1></div>
        <div class="row"><Select label="Checkpoint" value={path} empty="Choose…" options={models.map((m) => m.path)} onInput={(p) => go("checkpoint", { path: p })} />
          {path && <Select label="Compare with" value={other} empty="Nothing" options={models.map((m) => m.path).filter((p) => p !== path)} onInput={(p) => go("checkpoint", p ? { path, other: p } : { path })} />}</div></div>
      <Failure error={error} />
      {path && !data && !error && <Busy />}
      {data && (other ? <Difference first={path} second={other} /> : <Contents data={data} path={path} />)}
      {!path && <Note>Choose a checkpoint to see its layers, or open one from <a href={link("home")}>Home</a>.</Note>}
    </>
  );
}

/** Rows and columns of a picture over tensors: layers by what the tensor is in its layer. */
export function grid(tensors, value) {
  const layers = [...new Set(tensors.map((t) => place(t.name)[0]).filter(Boolean))];
  const kinds = [...new Set(tensors.filter((t) => place(t.name)[0]).map((t) => place(t.name)[1]))];
  const cells = new Map(tensors.map((t) => [place(t.name).join("|"), t]));
  const at = (l, k) => cells.get(`${l}|${k}`);
  return { layers, kinds, at, values: layers.map((l) => kinds.map((k) => (at(l, k) ? value(at(l, k)) : null))), rest: tensors.filter((t) => !place(t.name)[0]) };
}
const sizes = (shape) => shape.map((n) => n.toLocaleString("en")).join(" × ") || "scalar";
const short = (layers) => layers.map((l) => l.split(".").pop());

function Contents({ data, path }) {
  const { layers, kinds, at, values, rest } = useMemo(() => grid(data.tensors, (t) => t.nbytes), [data]);
  const [picked, pick] = useState(null);
  return (
    <>
      <div class="tiles">
        <div class="tile"><span class="muted">Parameters</span><strong>{count(data.parameters)}</strong></div>
        <div class="tile"><span class="muted">Size</span><strong>{bytes(data.nbytes)}</strong></div>
        <div class="tile"><span class="muted">Tensors</span><strong>{data.tensors.length}</strong></div>
        <div class="tile"><span class="muted">Dtype</span><strong>{Object.entries(data.dtypes).map(([d, n]) => Object.keys(data.dtypes).length > 1 ? `${d} ${percent(n / data.parameters)}` : d).join(", ")}</strong></div>
      </div>
      <Health data={data} path={path} />
      {layers.length > 0 && <Card title="Layer map">
        <HeatMap title="Bytes of every tensor, layers downwards" rows={short(layers)} columns={kinds} values={values} format={bytes} onPick={(i, j) => pick(at(layers[i], kinds[j]))} />
        {picked && <p><code>{picked.name}</code> {sizes(picked.shape)}, {picked.dtype}, {bytes(picked.nbytes)}</p>}
      </Card>}
      {data.recipe && <Card title="Made by" actions={<Button onClick={() => { keep("draft", { text: data.recipe }); go("recipe"); }}>Open as a recipe</Button>}><pre>{data.recipe}</pre></Card>}
      <Card title={layers.length ? "Outside the layers" : "Tensors"}>
        <Table caption="Tensors" columns={["tensor", "shape", "dtype", "size"]} rows={rest.map((t) => [t.name, sizes(t.shape), t.dtype, cell(t.nbytes, bytes(t.nbytes))])} />
      </Card>
      {Object.keys(data.config).length > 0 && <Card title="Config"><Table caption="Config" columns={["key", "value"]} rows={Object.entries(data.config).map(([k, v]) => [k, String(v)])} /></Card>}
    </>
  );
}

function Health({ data, path }) {
  const { data: jobs, reload } = useGet("/api/jobs");
  const [error, fail] = useState();
  const [found, set] = useState();
  const job = jobs?.find((j) => j.kind === "check" && j.shown?.path === path);
  useEffect(() => {
    if (job?.status === "done") get(`/api/jobs/${job.id}/result`).then(set, () => {});
    if (job && ["running", "starting"].includes(job.status)) { const t = setTimeout(reload, 1000); return () => clearTimeout(t); }
    return undefined;
  }, [job?.id, job?.status, jobs]);
  const bad = found?.checkpoints[0].tensors.filter((t) => t.not_finite);
  return (
    <Card title="Health" actions={<Button disabled={job?.status === "running"} onClick={() => post("/api/jobs", { kind: "check", values: { path } }).then(reload, fail)}>Read every weight</Button>}>
      <ul class="plain">
        {data.checks.map((c) => <li key={c.check}><Badge kind={c.holds ? "good" : "bad"}>{c.holds ? "OK" : "failed"}</Badge> {c.check}</li>)}
        {Object.entries(data.aliases).map(([a, b]) => <li key={a}><Badge>tied</Badge> {a} is {b}</li>)}
        {job && !found && <li><Badge kind="info">{job.status}</Badge> reading every weight</li>}
        {bad && (bad.length ? bad.map((t) => <li key={t.name}><Badge kind="bad">not finite</Badge> {t.name}: {t.not_finite} values</li>) : <li><Badge kind="good">OK</Badge> every value is finite</li>)}
      </ul>
      <p class="muted">fingerprint <code>{data.fingerprint.slice(0, 16)}</code></p>
      <Failure error={error} />
    </Card>
  );
}

function Difference({ first, second }) {
  const [tensors, set] = useState([]);
  const [ends, end] = useState({});
  const { start, running, error } = useStream("", (event) => {
    if (event.event === "tensor") set((before) => [...before, event]);
    else end((before) => ({ ...before, ...event }));
  });
  useEffect(() => { set([]); end({}); start(undefined, query("/api/difference", { first, second })); }, [first, second]);
  const { layers, kinds, values } = useMemo(() => grid(tensors, (t) => t.distance), [tensors]);
  const whole = tensors.reduce((a, t) => ({ d: a.d + t.square, n: a.n + t.norm }), { d: 0, n: 0 });
  const same = tensors.filter((t) => t.changed === 0).length, done = ends.event === "end";
  const by = layers.map((l) => tensors.filter((t) => place(t.name)[0] === l)).map((ts) => Math.sqrt(ts.reduce((a, t) => a + t.square, 0) / Math.max(1e-30, ts.reduce((a, t) => a + t.norm, 0))));
  return (
    <>
      <Failure error={error} />
      {running && <Busy>{tensors.length} of {ends.total ?? "…"} tensors compared</Busy>}
      <div class="tiles">
        <div class="tile"><span class="muted">Relative distance</span><strong>{done ? percent(Math.sqrt(whole.d / (whole.n || 1)), 2) : "…"}</strong></div>
        <div class="tile"><span class="muted">Tensors that differ</span><strong>{done ? `${tensors.length - same} of ${tensors.length}` : "…"}</strong></div>
      </div>
      {ends.only_first?.length > 0 && <Note kind="warn">Only in {first}: {ends.only_first.join(", ")}</Note>}
      {ends.only_second?.length > 0 && <Note kind="warn">Only in {second}: {ends.only_second.join(", ")}</Note>}
      {ends.reshaped?.length > 0 && <Note kind="warn">Of another shape: {ends.reshaped.join(", ")}</Note>}
      {layers.length > 0 && <Card title="Where they differ">
        <HeatMap title="‖b − a‖ / ‖a‖ of every tensor, layers downwards" rows={short(layers)} columns={kinds} values={values} low={0} format={(v) => percent(v, 2)} />
        <Chart title="Distance by layer" x="layer" y="relative distance of the layer" series={[{ name: "distance", x: by.map((_, i) => i), y: by }]} format={(v) => percent(v, 2)} />
      </Card>}
      <Card title="Tensors">
        <Table caption="Tensors by distance" columns={["tensor", "distance", "cosine", "entries changed"]}
          rows={[...tensors].sort((a, b) => (b.distance ?? 0) - (a.distance ?? 0)).slice(0, 60).map((t) => [t.name, cell(t.distance ?? 0, percent(t.distance, 2)), cell(t.cosine ?? 0, t.cosine == null ? "–" : t.cosine.toFixed(5)), cell(t.changed, percent(t.changed, 1))])} />
      </Card>
    </>
  );
}
