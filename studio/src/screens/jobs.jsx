import { useEffect, useState } from "preact/hooks";
import { get, go, link, post, remove, useWatch } from "../api.js";
import { ago, bytes, duration } from "../format.js";
import { Badge, Busy, Button, Card, Failure, Note, Progress, refreshHome, STATUS } from "../ui.jsx";

/** How far a job is, and the time left at the rate so far. */
const progress = ({ kind, attempts, seconds, progress: { done, total, bytes_per_second: known } }) => {
  const rate = known ?? (attempts === 1 ? done / seconds : 0), shown = kind === "merge" ? bytes : (n) => n;
  return `${shown(done)} of ${shown(total)}${kind === "evolve" ? " trials" : ""}${rate && total > done ? `, about ${duration((total - done) / rate)} left` : ""}`;
};

export function Jobs({ id }) {
  const { data, error } = useWatch("/api/jobs/watch");
  const [problem, fail] = useState();
  const jobs = data?.jobs;
  const act = (work) => { fail(); work.catch(fail); };
  return (
    <>
      <div class="head"><div><h1>Jobs</h1><p class="muted">Every job is a merganser command in its own process. It continues when you close this page or stop the studio.</p></div></div>
      <Failure error={problem ?? error} />
      {!jobs && !error && <Busy />}
      {jobs?.length === 0 && <Note>No jobs yet. Merge a <a href={link("recipe")}>recipe</a>, check a <a href={link("checkpoint")}>checkpoint</a> or look for <a href={link("interference")}>interference</a>.</Note>}
      {jobs?.map((job) => (
        <Card key={job.id} class={job.id === id ? "job open" : "job"}>
          <div class="row between">
            <h2><a href={link("jobs", { id: job.id === id ? "" : job.id })}>{job.title}</a></h2>
            <div class="row"><Badge kind={STATUS[job.status]}>{job.status}</Badge>
              {job.status === "running" && <Button kind="small" onClick={() => act(post(`/api/jobs/${job.id}/cancel`, {}))}>Cancel</Button>}
              {["failed", "cancelled", "interrupted"].includes(job.status) && <Button kind="small" onClick={() => act(post(`/api/jobs/${job.id}/resume`, {}))}>{job.resumable ? "Resume" : "Run again"}</Button>}
              {job.status === "done" && job.shown && <Button kind="small primary" onClick={() => { refreshHome(); go(job.shown.screen, job.shown.path ? { path: job.shown.path } : { job: job.id }); }}>Open the result</Button>}
              {!["running", "starting"].includes(job.status) && <Button kind="small" aria-label={`Forget ${job.title}`} onClick={() => act(remove(`/api/jobs/${job.id}`))}>Forget</Button>}</div>
          </div>
          {["running", "starting"].includes(job.status) && <><Progress job={job} />{job.progress && <p class="muted">{progress(job)}</p>}</>}
          <p class="muted">{ago(job.created)}{["running", "starting"].includes(job.status) ? "" : `, took ${duration(job.seconds)}`}{job.attempts > 1 ? `, attempt ${job.attempts}` : ""}</p>
          {job.error && <Note kind="bad">{job.error}</Note>}
          {job.id === id && <Log id={id} status={job.status} />}
        </Card>))}
    </>
  );
}

function Log({ id, status }) {
  const [job, set] = useState();
  useEffect(() => {
    const look = () => get(`/api/jobs/${id}`).then(set, () => {});
    look();
    const timer = status === "running" ? setInterval(look, 1000) : 0;
    return () => clearInterval(timer);
  }, [id, status]);
  if (!job) return null;
  const events = job.events.filter((e) => e.event !== "progress");
  return (
    <>
      <pre class="command">merganser {job.arguments.join(" ")}</pre>
      {events.length > 0 && <details><summary>What the command reported</summary><pre tabindex="0" aria-label="Events">{events.map((e) => JSON.stringify(e)).join("\n").slice(0, 8000)}</pre></details>}
      {job.log && <pre tabindex="0" aria-label="Log">{job.log.slice(-8000)}</pre>}
    </>
  );
}
