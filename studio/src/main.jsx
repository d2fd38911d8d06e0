import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { link, parseRoute } from "./api.js";
import { Checkpoint } from "./screens/checkpoint.jsx";
import { Compare } from "./screens/compare.jsx";
import { Evolve } from "./screens/evolve.jsx";
import { Home } from "./screens/home.jsx";
import { Interference } from "./screens/interference.jsx";
import { Jobs } from "./screens/jobs.jsx";
import { Landscape } from "./screens/landscape.jsx";
import { Library } from "./screens/library.jsx";
import { Mixer } from "./screens/mixer.jsx";
import { Recipe } from "./screens/recipe.jsx";
import "./style.css";

const SCREENS = {
  home: ["Home", Home],
  checkpoint: ["Checkpoint", Checkpoint],
  recipe: ["Recipe", Recipe],
  mixer: ["Mixer", Mixer],
  compare: ["Compare", Compare],
  interference: ["Interference", Interference],
  library: ["Library", Library],
  evolve: ["Evolve", Evolve],
  landscape: ["Landscape", Landscape],
  jobs: ["Jobs", Jobs],
};
const THEMES = { auto: "System colours", light: "Light", dark: "Dark" };

function App() {
  const [route, setRoute] = useState(parseRoute());
  const [theme, setTheme] = useState(localStorage.getItem("merganser-theme") ?? "auto");
  const main = useRef();
  useEffect(() => {
    const change = () => setRoute(parseRoute());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("merganser-theme", theme);
    dispatchEvent(new Event("theme"));
  }, [theme]);
  const [title, Screen] = SCREENS[route.screen] ?? SCREENS.home;
  useEffect(() => {
    document.title = `${title} · Merganser studio`;
    document.querySelector(".side [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  }, [title]);
  return (
    <>
      <a class="skip" href="#main" onClick={(e) => { e.preventDefault(); main.current.focus(); }}>Skip to content</a>
      <nav class="side" aria-label="Screens">
        <a class="brand" href={link("home")}><img src="icon.svg" alt="" width="26" height="26" />Merganser</a>
        <ul>{Object.entries(SCREENS).map(([key, [text]]) => (
          <li key={key}><a href={link(key)} aria-current={route.screen === key ? "page" : undefined}>{text}</a></li>))}</ul>
        <select class="theme" aria-label="Colours" value={theme} onChange={(e) => setTheme(e.currentTarget.value)}>
          {Object.entries(THEMES).map(([key, text]) => <option key={key} value={key}>{text}</option>)}
        </select>
      </nav>
      <main id="main" ref={main} tabindex="-1"><Screen key={location.hash} {...route.values} /></main>
    </>
  );
}

render(<App />, document.getElementById("app"));
