import { get, type RunInfo } from "./api";
import { redrawCharts } from "./charts";
import { compareView } from "./compare";
import { h, replace, setText } from "./dom";
import { runView } from "./run";
import { runsView } from "./runs";
import { link, parts, setConnected, type View } from "./view";

const main = document.getElementById("main")!;
let view: View | null = null;

/** Show what the address names. */
function route(): void {
  if (location.hash === "#main") return; // the link that skips to the content
  view?.close();
  const [name = "runs", ...rest] = parts(location.hash);
  view =
    name === "run" && rest[0] !== undefined
      ? runView(main, rest[0], rest[1] ?? "curves")
      : name === "compare"
        ? compareView(main, rest)
        : name === "started"
          ? startedView(Number(rest[0]))
          : runsView(main);
  document.title = `${view.title} – Shoal`;
  for (const item of document.querySelectorAll<HTMLElement>("[data-nav]")) {
    if (item.dataset.nav === name) item.setAttribute("aria-current", "page");
    else item.removeAttribute("aria-current");
  }
}

/** Wait for the first run that is created from a time on, in seconds since 1970, and show it. `shoal run --watch` prints this address. */
function startedView(time: number): View {
  replace(main, h("p", { class: "empty", role: "status" }, "Waiting for the run to start… ", h("a", { href: "#/" }, "Show all runs")));
  let isOpen = true;
  const look = async () => {
    const runs = await get<RunInfo[]>("runs").catch(() => null);
    if (!isOpen) return;
    setConnected(runs !== null);
    const started = runs?.filter((run) => run.created >= time).at(-1); // the newest run is the first
    if (started) location.replace(link("run", started.id));
    else timer = window.setTimeout(look, runs ? 500 : 2000);
  };
  let timer = window.setTimeout(look, 500);
  return { title: "Waiting", close: () => ((isOpen = false), clearTimeout(timer)) };
}

const button = document.getElementById("theme")!;
const system = matchMedia("(prefers-color-scheme: dark)");

function theme(): string {
  return localStorage.getItem("theme") ?? (system.matches ? "dark" : "light");
}

function applyTheme(): void {
  document.documentElement.dataset.theme = theme();
  setText(button, theme() === "dark" ? "Light theme" : "Dark theme");
  redrawCharts();
  view?.recolour?.();
}

button.addEventListener("click", () => {
  localStorage.setItem("theme", theme() === "dark" ? "light" : "dark");
  applyTheme();
});
system.addEventListener("change", applyTheme);
document.querySelector(".skip")!.addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", route);
applyTheme();
route();
