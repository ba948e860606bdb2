import { get, type RunState } from "./api";
import { h, setText } from "./dom";
import * as format from "./format";
import { Snapshot, type RunData } from "./store";

const KEPT_STATES = 300;
const PLAY_MS = 150;

/** The slider that shows the state of a run at an earlier time. */
export class Replay {
  readonly element: HTMLElement;
  /** The time that is shown; null: the latest. */
  at: number | null = null;
  snapshot: Snapshot;
  private readonly slider = h("input", { type: "range", min: 0, max: 0, step: 1, value: 0, "aria-label": "Time of the replay", input: () => this.move() });
  private readonly play = h("button", { type: "button", click: () => this.toggle() }, "Play");
  private readonly latest = h("button", { type: "button", class: "quiet", click: () => this.leave() });
  private readonly label = h("output", { class: "moment" });
  private readonly kept = new Map<number, Snapshot>();
  private stops: number[] = [];
  private resets = 0;
  private busy = false;
  private timer = 0;

  constructor(private readonly id: string, private readonly run: RunData, private readonly changed: () => void) {
    this.snapshot = run.now;
    this.element = h("section", { class: "replay", "aria-label": "Replay" }, this.play, this.slider, this.label, this.latest);
  }

  close(): void {
    clearTimeout(this.timer);
  }

  /** New records have arrived. */
  update(): void {
    if (this.resets !== this.run.resets) this.kept.clear();
    this.resets = this.run.resets;
    this.stops = this.run.stops;
    this.element.hidden = this.stops.length < 2;
    this.slider.max = String(Math.max(this.stops.length - 1, 0));
    if (this.at === null) {
      this.slider.value = this.slider.max;
      this.snapshot = this.run.now;
    }
    setText(this.latest, this.run.isLive ? "Live" : "End");
    this.latest.disabled = this.at === null;
    this.describe();
  }

  private describe(): void {
    const at = this.at ?? this.run.duration;
    const round = this.run.axisAt("rounds", at) ?? 0;
    const prefix = this.at === null && this.run.isLive ? "live: " : "";
    const text = `${prefix}round ${format.count(round)}, ${format.seconds(at)}`;
    setText(this.label, text);
    this.slider.setAttribute("aria-valuetext", text);
  }

  private move(): void {
    const place = Number(this.slider.value);
    this.at = place >= this.stops.length - 1 ? null : this.stops[place]!;
    this.latest.disabled = this.at === null;
    if (this.at === null) this.snapshot = this.run.now;
    this.describe();
    this.changed();
    void this.read();
  }

  private leave(): void {
    this.stop();
    this.slider.value = this.slider.max;
    this.move();
  }

  private toggle(): void {
    if (this.timer) return this.stop();
    if (Number(this.slider.value) >= this.stops.length - 1) this.slider.value = "0";
    setText(this.play, "Pause");
    this.step();
  }

  private stop(): void {
    clearTimeout(this.timer);
    this.timer = 0;
    setText(this.play, "Play");
  }

  private step(): void {
    this.move();
    if (this.at === null) return this.stop();
    this.timer = window.setTimeout(() => {
      this.slider.value = String(Number(this.slider.value) + 1);
      this.step();
    }, PLAY_MS);
  }

  /** Read the state at the chosen time, unless the page has it. While one is read, only the last choice counts. */
  private async read(): Promise<void> {
    if (this.busy) return;
    while (this.at !== null) {
      const at = this.at;
      let found = this.kept.get(at);
      if (!found) {
        this.busy = true;
        try {
          const state = await get<RunState>("state", { run: this.id, at });
          found = new Snapshot();
          found.apply(state.state, state.edges);
          this.kept.set(at, found);
          if (this.kept.size > KEPT_STATES) this.kept.delete(this.kept.keys().next().value!);
        } catch {
          return; // the connection shows the problem
        } finally {
          this.busy = false;
        }
      }
      if (this.at === null) return;
      this.snapshot = found;
      this.changed();
      if (this.at === at) return;
    }
  }
}
