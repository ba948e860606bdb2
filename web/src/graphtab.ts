import { get } from "./api";
import { lag, rgb, STATE_COLOURS, UNKNOWN, viridis, type Colour } from "./colours";
import { css, h, labelled, replace, select, setOptions, setText } from "./dom";
import * as format from "./format";
import { GraphView } from "./graphview";
import { NodePanel } from "./nodepanel";
import type { Scene } from "./renderer";
import type { Replay } from "./replay";
import type { Tab } from "./run";
import { FAILED, type RunData, type Snapshot } from "./store";

interface Layout {
  id: number[];
  x: number[];
  y: number[];
}

const RETRY_MS = 2000;
const STATES = ["running", "ended", "failed"];

/** The graph of a run: who sent to whom, coloured by score, staleness or failure. */
export class GraphTab implements Tab {
  readonly element: HTMLElement;
  private readonly view: GraphView;
  private readonly panel: NodePanel;
  private readonly note = h("p", { class: "empty", hidden: true });
  private readonly scale = h("span", { class: "scale" });
  private readonly counts = h("output", { class: "counts" });
  private readonly number = h("input", { type: "number", min: 0, step: 1, "aria-label": "Number of the node", change: () => this.choose(this.number.value === "" ? null : Number(this.number.value)) });
  private readonly colours = select([], "", (value) => ((this.colour = value), this.update()));
  private colour = "";
  private layout: Layout | null = null;
  private places = new Map<number, number>();
  private asked = "";
  private problem = "";
  private retry = 0;
  private isOpen = true;
  private chosen: number | null = null;
  private drawn: Snapshot | null = null;
  private drawnEdges = "";
  private edges = new Float32Array(0);

  constructor(private readonly id: string, private readonly run: RunData, private readonly replay: Replay) {
    this.view = new GraphView((node) => this.choose(node), (node) => this.describe(node));
    this.panel = new NodePanel(id, run, () => this.choose(null));
    const fit = h("button", { type: "button", click: () => this.view.fit() }, "Show all");
    const tools = h("div", { class: "tools" }, labelled("Colour by", this.colours), this.scale, labelled("Node", this.number), fit);
    const stage = h("div", { class: "card" }, tools, this.note, this.view.element, this.counts);
    this.element = h("div", { class: "graph" }, stage, this.panel.element);
    this.element.dataset.renderer = this.view.renderer.kind;
    Object.assign(this.element, { graphView: this.view }); // for the benchmark of frames
  }

  close(): void {
    this.isOpen = false;
    clearTimeout(this.retry);
    this.view.close();
    this.panel.close();
  }

  recolour(): void {
    this.drawn = null;
    this.drawnEdges = "";
    this.update();
  }

  update(): void {
    const metrics = Object.keys(this.run.curves);
    const options = [...metrics.map((name): [string, string] => [name, name]), ["lag", "staleness"], ["state", "failure"]] as [string, string][];
    if (!options.some(([name]) => name === this.colour) || (this.colour === "state" && !this.drawn)) this.colour = this.run.metric ?? "state";
    setOptions(this.colours, options, this.colour);
    const missing = !this.run.nodeCount ? "No records yet." : this.run.hasEdges || this.run.now.latestRound === 0 ? "" : "The records of this run do not contain who sent to whom: edges are missing. Runs of earlier versions do not have them.";
    const note = this.problem || missing;
    setText(this.note, note);
    this.note.hidden = note === "";
    void this.place();
    this.draw();
    this.panel.update();
  }

  /** Ask for the positions of the nodes, once they are known. */
  private async place(): Promise<void> {
    const count = this.run.nodeCount;
    const asked = `${this.run.resets} ${count}`;
    if (count === 0 || this.asked === asked || (!this.run.hasEdges && this.run.isLive && this.run.now.latestRound === 0)) return;
    this.asked = asked;
    clearTimeout(this.retry);
    try {
      const layout = await get<Layout>("layout", { run: this.id });
      if (!this.isOpen || this.asked !== asked) return;
      this.layout = layout;
      this.problem = "";
    } catch (error) {
      if (!this.isOpen || this.asked !== asked) return;
      this.problem = `The positions of the nodes could not be read: ${(error as Error).message}`;
      this.retry = window.setTimeout(() => ((this.asked = ""), this.update()), RETRY_MS);
    }
    this.places = new Map(this.layout?.id.map((id, i) => [id, i]));
    this.drawnEdges = "";
    this.update();
  }

  private choose(node: number | null): void {
    this.chosen = node !== null && this.layout && !this.places.has(node) ? null : node;
    this.number.value = this.chosen === null ? "" : String(this.chosen);
    this.panel.show(this.chosen);
    this.draw();
  }

  private describe(node: number): string {
    const values = this.replay.snapshot.nodes.get(node);
    if (!values) return `node ${node}: no records`;
    const score = this.run.metric ? `, ${this.run.metric} ${format.score(values.scores[this.run.metric])}` : "";
    return `node ${node}: round ${values.round}${score}${values.state === FAILED ? ", failed" : ""}`;
  }

  private draw(): void {
    const snapshot = this.replay.snapshot;
    this.showScale(snapshot);
    if (!this.layout) return;
    const count = this.layout.id.length;
    const positions = new Float32Array(2 * count);
    this.layout.id.forEach((_, i) => positions.set([this.layout!.x[i]!, this.layout!.y[i]!], 2 * i));
    const edgesChanged = this.findEdges(snapshot, positions);
    const colours = new Float32Array(3 * count);
    const shapes = new Float32Array(count);
    const colourOf = this.colouring(snapshot);
    this.layout.id.forEach((id, i) => {
      colours.set(colourOf(id), 3 * i);
      shapes[i] = snapshot.nodes.get(id)?.state === FAILED ? 1 : 0;
    });
    const chosen = this.chosen === null ? null : this.places.get(this.chosen) ?? null;
    const scene: Scene = {
      positions,
      colours,
      shapes,
      radius: count <= 64 ? Math.min(0.09, 1.6 / count) : 0.62 / Math.sqrt(count),
      edges: this.edges,
      chosenEdges: this.edgesOf(snapshot, positions),
      chosen,
      background: parse(css("--card")),
      edgeColour: css("--edge").split(",").map(Number) as Colour,
      accent: parse(css("--accent")),
    };
    this.view.show(scene, this.layout.id, edgesChanged);
    this.drawn = snapshot;
    const edges = `, ${format.count(this.edges.length / 4)} edges${snapshot.leftOut ? ` drawn, ${format.count(snapshot.leftOut)} left out` : ""}`;
    setText(this.counts, `${format.count(count)} nodes${this.run.hasEdges ? edges : ""}`);
  }

  /** Collect the edges of the current round. Returns whether they changed. */
  private findEdges(snapshot: Snapshot, positions: Float32Array): boolean {
    const found: number[] = [];
    let print = 0;
    for (const [sender, receivers] of snapshot.sentTo) {
      const a = this.places.get(sender);
      if (a === undefined) continue;
      for (const receiver of receivers) {
        const b = this.places.get(receiver);
        if (b === undefined) continue;
        if (a > b && snapshot.sentTo.get(receiver)?.includes(sender)) continue; // drawn from the other side
        found.push(positions[2 * a]!, positions[2 * a + 1]!, positions[2 * b]!, positions[2 * b + 1]!);
        print = (Math.imul(print, 31) + a * 65537 + b) | 0;
      }
    }
    const drawn = `${found.length} ${print} ${css("--card")}`;
    if (drawn === this.drawnEdges) return false;
    this.drawnEdges = drawn;
    this.edges = new Float32Array(found);
    return true;
  }

  private edgesOf(snapshot: Snapshot, positions: Float32Array): Float32Array {
    if (this.chosen === null) return new Float32Array(0);
    const found: number[] = [];
    const add = (from: number, to: number) => {
      const [a, b] = [this.places.get(from), this.places.get(to)];
      if (a !== undefined && b !== undefined) found.push(positions[2 * a]!, positions[2 * a + 1]!, positions[2 * b]!, positions[2 * b + 1]!);
    };
    for (const receiver of snapshot.sentTo.get(this.chosen) ?? []) add(this.chosen, receiver);
    for (const [sender, receivers] of snapshot.sentTo) if (receivers.includes(this.chosen)) add(sender, this.chosen);
    return new Float32Array(found);
  }

  /** The lowest and highest score of all nodes during the run, so that colours keep their meaning. */
  private range(): [number, number] {
    const curve = this.run.curves[this.colour];
    const finite = (values: (number | null)[]) => values.filter((value): value is number => value !== null && Number.isFinite(value));
    const low = Math.min(...finite(curve?.min ?? []), Infinity);
    const high = Math.max(...finite(curve?.max ?? []), -Infinity);
    return low < high ? [low, high] : [0, 1];
  }

  private lagging(snapshot: Snapshot): number {
    let most = 1;
    const latest = snapshot.latestRound;
    for (const node of snapshot.nodes.values()) if (node.state !== FAILED) most = Math.max(most, latest - node.round);
    return most;
  }

  private colouring(snapshot: Snapshot): (id: number) => Colour {
    if (this.colour === "state") return (id) => STATE_COLOURS[snapshot.nodes.get(id)?.state ?? -1] ?? UNKNOWN;
    if (this.colour === "lag") {
      const [latest, most] = [snapshot.latestRound, this.lagging(snapshot)];
      return (id) => {
        const node = snapshot.nodes.get(id);
        return node ? lag((latest - node.round) / most) : UNKNOWN;
      };
    }
    const [low, high] = this.range();
    const isLoss = ["loss", "perplexity", "rmse"].includes(this.colour);
    return (id) => {
      const value = snapshot.nodes.get(id)?.scores[this.colour];
      if (value == null) return UNKNOWN;
      const share = (value - low) / (high - low);
      return viridis(isLoss ? 1 - share : share);
    };
  }

  private showScale(snapshot: Snapshot): void {
    if (this.colour === "state") {
      replace(this.scale, ...STATES.map((name, i) => {
        const swatch = h("span", { class: "swatch" });
        swatch.style.setProperty("--swatch", rgb(STATE_COLOURS[i]!));
        return h("span", { class: "key" }, swatch, name);
      }));
      return;
    }
    const isLag = this.colour === "lag";
    const [low, high] = isLag ? [0, this.lagging(snapshot)] : this.range();
    const isLoss = ["loss", "perplexity", "rmse"].includes(this.colour);
    const colour = isLag ? lag : (share: number) => viridis(isLoss ? 1 - share : share);
    const ramp = h("span", { class: "ramp" });
    ramp.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((share) => rgb(colour(share))).join(", ")})`;
    const show = (value: number) => (isLag ? format.count(value) : String(+value.toPrecision(3)));
    replace(this.scale, h("span", {}, show(low)), ramp, h("span", {}, show(high) + (isLag ? " rounds behind" : "")));
  }
}

function parse(hex: string): Colour {
  const n = parseInt(hex.slice(1), 16);
  return [n >> 16, (n >> 8) & 255, n & 255];
}
