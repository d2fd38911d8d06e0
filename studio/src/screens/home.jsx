import { link, useGet } from "../api.js";
import { ago, bytes, count } from "../format.js";
import { Badge, Busy, Card, Failure, Note, Progress, refreshHome, STATUS, useFilter } from "../ui.jsx";

const KINDS = [
  ["checkpoint", "Checkpoints", "checkpoint"],
  ["adapter", "Adapters", "checkpoint"],
  ["recipe", "Recipes", "recipe"],
  ["library", "Libraries", "library"],
  ["study", "Studies", "evolve"],
  ["run", "Run files of searches", "evolve"],
  ["alignment", "Alignments", "landscape"],
  ["sweep", "Sweeps", null],
  ["questions", "Questions", null],
];
const facts = ({ kind, facts: f, bytes: size }) => [
  f.parameters && `${count(f.parameters)} parameters`, f.dtypes?.join(", "), f.layers && `${f.layers} layers`,
  f.experts && `${f.experts.length} experts`, f.kind, f.live && "generates text", kind !== "recipe" && kind !== "run" && bytes(size),
].filter(Boolean).join(" · ");

export function Home() {
  const { data, error, reload } = useGet("/api/home");
  if (error) return <><h1>Studio</h1><Failure error={error} /></>;
  if (!data) return <Busy>Looking into the folder…</Busy>;
  const { items, jobs, machine, live, root } = data;
  const models = items.filter((i) => i.kind === "checkpoint");
  return (
    <>
      <div class="head"><div><h1>{root.split("/").pop()}</h1><p class="muted path">{root}</p></div>
        <button type="button" class="button" onClick={() => { refreshHome(); reload(); }}>Refresh</button></div>
      <div class="tiles">
        <Tile label="Models" value={models.length} />
        <Tile label="Free disk" value={bytes(machine.disk_free)} of={bytes(machine.disk_total)} share={1 - machine.disk_free / machine.disk_total} />
        <Tile label="Free memory" value={bytes(machine.memory_free)} of={bytes(machine.memory_total)} share={1 - machine.memory_free / machine.memory_total} />
        <Tile label="Model in memory" value={live.loaded ? bytes(live.bytes) : "none"} />
      </div>
      {models.length > 1 && <div class="row actions"><a class="button primary" href={link("mixer")}>Mix models</a><a class="button" href={link("recipe")}>Write a recipe</a><a class="button" href={link("compare")}>Compare what they say</a></div>}
      {!items.length && <Card title="Nothing here yet"><p>This folder has no checkpoints, recipes, libraries or studies. Put models into it, or start the studio on another folder: <code>merganser studio DIR</code>.</p></Card>}
      <div class="columns">
        <Items items={items} />
        <Card title="Recent jobs" actions={<a href={link("jobs")}>All jobs</a>}>
          {jobs.length ? <ul class="items">{jobs.map((job) => (
            <li key={job.id}><a href={link("jobs", { id: job.id })}>{job.title}</a><Badge kind={STATUS[job.status]}>{job.status}</Badge>
              <time class="muted">{ago(job.created)}</time>{job.status === "running" && <Progress job={job} />}</li>))}</ul>
            : <p class="muted">Merges, checks and searches that you start appear here. They continue when you close this page.</p>}
        </Card>
      </div>
    </>
  );
}

function Items({ items }) {
  const [found, filter] = useFilter(items);
  return (
    <div>
      {filter}
      {KINDS.filter(([kind]) => found.some((i) => i.kind === kind)).map(([kind, title, screen]) => (
        <Card key={kind} title={title}>
          <ul class="items">{found.filter((i) => i.kind === kind).map((item) => (
            <li key={item.path}>
              {screen ? <a href={link(screen, { path: item.path })}>{item.path}</a> : <span>{item.path}</span>}
              {item.facts.damaged && <Badge kind="bad">damaged</Badge>}
              {item.facts.merged && <Badge>merged</Badge>}
              <time class="muted">{ago(item.modified)}</time>
              <span class="muted facts-line">{facts(item)}</span>
            </li>))}</ul>
        </Card>))}
      {items.length > 0 && !found.length && <Note>Nothing has this name.</Note>}
    </div>
  );
}

const Tile = ({ label, value, of, share }) => (
  <div class="tile"><span class="muted">{label}</span><strong>{value}{of && <small class="muted">of {of}</small>}</strong>
    {share != null && <div class="meter" aria-hidden="true"><i style={{ width: `${100 * share}%` }} /></div>}</div>
);
