import { get, Stream, type Details, type Numbers, type RunInfo } from "./api";
import { Chart, last, type Line } from "./charts";
import { KINDS } from "./colours";
import { h, labelled, replace, select, setOptions, setText } from "./dom";
import * as format from "./format";
import { badge } from "./runs";
import { RunData, type Axis } from "./store";
import { link, setConnected, type View } from "./view";
import uPlot from "uplot";

const LONGEST_VALUE = 40;

/** Several runs in one chart, with what differs between their experiments. */
export function compareView(main: HTMLElement, ids: string[]): View {
  if (ids.length === 0) return chooseView(main);
  const runs = new Map<string, RunData>();
  const settings = new Map<string, Map<string, string>>();
  const problems = new Map<string, string>();
  let axis: Axis = "rounds";
  let metric = "";
  const metrics = select([], "", (value) => ((metric = value), show()));
  const axes = select([["rounds", "rounds"], ["time", "time"], ["bytes", "bytes"]], axis, (value) => ((axis = value as Axis), show()));
  const chart = new Chart("Mean over the nodes", 420);
  const table = h("table", { class: "runs" });
  const note = h("p", { class: "notice", role: "status" });
  replace(
    main,
    h("div", { class: "heading" }, h("h1", {}, "Compare runs"), h("div", { class: "tools" }, labelled("Metric", metrics), labelled("By", axes))),
    note,
    h("div", { class: "card" }, chart.element),
    h("div", { class: "card scroll" }, table),
  );

  function show(): void {
    const found = ids.filter((id) => runs.has(id));
    const names = [...new Set(found.flatMap((id) => Object.keys(runs.get(id)!.curves)))];
    if (!names.includes(metric)) metric = runs.get(found[0] ?? "")?.metric ?? names[0] ?? "";
    setOptions(metrics, names.map((name) => [name, name]), metric);
    const differing = differences(found.map((id) => settings.get(id) ?? new Map()));
    const labels = distinct(found.map((id) => label(runs.get(id)!.info, settings.get(id), differing)), found);
    const clocks = new Set(found.map((id) => (runs.get(id)!.info.engine === "simulation" ? "virtual" : "wall")));
    const notes = [...problems.values()];
    if (clocks.size > 1 && axis === "time") notes.push("These runs have different clocks, virtual and wall time: their times cannot be compared.");
    const without = found.filter((id) => !runs.get(id)!.curves[metric]);
    if (metric && without.length) notes.push(`${without.length} of these runs did not measure ${metric}.`);
    setText(note, notes.join(" "));
    note.hidden = notes.length === 0;
    chart.title = metric ? `${metric}, mean over the nodes` : "Mean over the nodes";
    drawCurves(found, labels);
    drawTable(found, labels, differing);
  }

  function drawCurves(found: string[], labels: string[]): void {
    const drawn = found.map((id, i) => ({ run: runs.get(id)!, i })).filter(({ run }) => run.curves[metric]);
    if (!drawn.length) return chart.show(found.length ? "No run has been evaluated yet." : "Reading the runs…");
    const tables = drawn.map(({ run }) => {
      const curve = run.curves[metric]!;
      const x = run.axis(axis, curve.round!, curve.time!);
      return [x, curve.mean!] as unknown as uPlot.AlignedData;
    });
    const [x, ...columns] = uPlot.join(tables) as unknown as Numbers[];
    const lines: Line[] = drawn.map(({ i }, column) => ({
      label: labels[i]!,
      values: columns[column]!,
      colour: KINDS[i % KINDS.length]!,
      dash: i >= KINDS.length ? [6, 4] : undefined,
    }));
    chart.show({ x: x!, axis, lines });
  }

  function drawTable(found: string[], labels: string[], differing: string[]): void {
    const heads = ["Run", "Status", metric || "Score", "Time", "Bytes sent", ...differing];
    replace(
      table,
      h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, ...found.map((id, i) => {
        const run = runs.get(id)!;
        const swatch = h("span", { class: "swatch line" });
        swatch.style.setProperty("--swatch", KINDS[i % KINDS.length]!);
        const cells = [format.score(last(run.curves[metric]?.mean)), format.seconds(run.duration), format.bytes(last(run.training.bytes?.sum))];
        const own = differing.map((name) => settings.get(id)?.get(name) ?? "–");
        return h("tr", {}, h("td", { class: "name" }, swatch, h("a", { href: link("run", id) }, labels[i]!)), h("td", {}, badge(run.info.status)), ...[...cells, ...own].map((cell) => h("td", { title: cell }, cell)));
      })),
    );
  }

  for (const id of ids) {
    get<Details>("details", { run: id }).then(
      (details) => (settings.set(id, flatten(details.experiment)), show()),
      (error: Error) => (problems.set(id, error.message), show()),
    );
  }
  const stream = new Stream(ids, false, {
    run: (changes) => {
      const data = runs.get(changes.run) ?? new RunData();
      data.apply(changes);
      runs.set(changes.run, data);
      show();
    },
    problem: (run, error) => (problems.set(run, error), show()),
  }, setConnected);
  show();
  return { title: "Compare runs", close: () => (stream.close(), chart.close()) };
}

function chooseView(main: HTMLElement): View {
  const list = h("a", { href: "#/" }, "list of runs");
  replace(main, h("h1", {}, "Compare runs"), h("p", { class: "empty" }, "Choose runs in the ", list, "."));
  return { title: "Compare runs", close: () => undefined };
}

export function flatten(table: Record<string, unknown>, prefix = ""): Map<string, string> {
  const found = new Map<string, string>();
  for (const [name, value] of Object.entries(table)) {
    if (prefix === "" && name === "versions") continue;
    const key = prefix + name;
    if (value && typeof value === "object" && !Array.isArray(value)) {
      for (const [inner, text] of flatten(value as Record<string, unknown>, `${key}.`)) found.set(inner, text);
    } else {
      found.set(key.replace(/\.name$/, ""), typeof value === "string" ? value : JSON.stringify(value));
    }
  }
  return found;
}

function differences(all: Map<string, string>[]): string[] {
  const names = new Set(all.flatMap((settings) => [...settings.keys()]));
  const found = [...names].filter((name) => name !== "name" && new Set(all.map((settings) => settings.get(name) ?? "–")).size > 1);
  // the options of components with different names differ too
  return found.filter((name) => !found.some((other) => name.startsWith(`${other}.`)));
}

function label(info: RunInfo, settings: Map<string, string> | undefined, differing: string[]): string {
  const own = differing.filter((name) => settings?.has(name)).slice(0, 3).map((name) => `${name} = ${shorten(settings!.get(name)!)}`);
  return [info.name, ...own].join(", ");
}

function shorten(value: string): string {
  return value.length > LONGEST_VALUE ? `${value.slice(0, LONGEST_VALUE - 1)}…` : value;
}

/** Add to equal labels the last part of the id of their run, or the whole id if these are equal too. */
function distinct(labels: string[], ids: string[]): string[] {
  const differ = (texts: string[]) => texts.map((text) => texts.indexOf(text) === texts.lastIndexOf(text));
  const add = (texts: string[]) => labels.map((label, i) => (isUnique[i] ? label : `${label}, ${texts[i]}`));
  const isUnique = differ(labels);
  const short = add(ids.map((id) => id.split("/").at(-1)!));
  return differ(short).every(Boolean) ? short : add(ids);
}
