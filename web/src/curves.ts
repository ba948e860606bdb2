import { Chart } from "./charts";
import { h, labelled, select, setOptions } from "./dom";
import * as format from "./format";
import type { Replay } from "./replay";
import type { Axis, Curve, RunData } from "./store";
import type { Tab } from "./run";
import { KINDS } from "./colours";

const [BLUE, ORANGE, GREEN] = [KINDS[0]!, KINDS[1]!, KINDS[2]!];

/** The curves of a run, with the spread over the nodes. */
export class CurvesTab implements Tab {
  readonly element: HTMLElement;
  private axis: Axis = "rounds";
  private metric = "";
  private readonly metrics = select([], "", (value) => ((this.metric = value), this.update()));
  private readonly score = new Chart("Score", 320);
  private readonly loss = new Chart("Training loss");
  private readonly consensus = new Chart("Distance of the nodes to their average");
  private readonly bytes = new Chart("Bytes sent by all nodes");
  private readonly messages = new Chart("Messages sent by all nodes");

  constructor(private readonly run: RunData, private readonly replay: Replay) {
    const options: [string, string][] = [["rounds", "rounds"], ["time", "time"], ["bytes", "bytes"]];
    const axes = select(options, this.axis, (value) => ((this.axis = value as Axis), this.update()));
    const tools = h("div", { class: "tools" }, labelled("Metric", this.metrics), labelled("By", axes));
    const small = [this.loss, this.consensus, this.bytes, this.messages].map((c) => h("div", { class: "card" }, c.element));
    this.element = h("div", {}, tools, h("div", { class: "card" }, this.score.element), h("div", { class: "grid" }, ...small));
  }

  private get charts(): Chart[] {
    return [this.score, this.loss, this.consensus, this.bytes, this.messages];
  }

  close(): void {
    for (const chart of this.charts) chart.close();
  }

  mark(): void {
    const at = this.replay.at;
    for (const chart of this.charts) chart.setMark(at === null ? null : this.run.axisAt(this.axis, at));
  }

  update(): void {
    const names = Object.keys(this.run.curves);
    if (!names.includes(this.metric)) this.metric = this.run.metric ?? "";
    setOptions(this.metrics, names.map((name) => [name, name]), this.metric);
    this.showScore();
    const { loss, bytes, messages } = this.run.training;
    this.showTotals(this.bytes, bytes, format.bytes);
    this.showTotals(this.messages, messages, (value) => format.count(value));
    if (loss) {
      this.loss.show({ x: this.x(loss), axis: this.axis, lines: [{ label: "mean", values: loss.mean!, colour: BLUE }], bands: bands(loss, BLUE) });
    } else this.loss.show("The nodes report no training loss.");
    const { round, time, consensus } = this.run.averages;
    if (round.length) {
      this.consensus.show({ x: this.run.axis(this.axis, round, time), axis: this.axis, lines: [{ label: "root mean square distance", values: consensus, colour: GREEN }] });
    } else this.consensus.show("The average of all models was not evaluated: see evaluation.average.");
    this.mark();
  }

  private showScore(): void {
    const curve = this.run.curves[this.metric];
    this.score.title = this.metric ? `${this.metric} by ${this.axis}` : "Score";
    if (!curve) {
      this.score.show(this.run.isLive ? "No evaluation yet." : "This run has no evaluations: see evaluation.every.");
      return;
    }
    const lines = [{ label: "mean over the nodes", values: curve.mean!, colour: BLUE }];
    const average = this.averageAt(curve);
    if (average) lines.push({ label: "average of all models", values: average, colour: ORANGE, ...{ dash: [6, 4] } });
    this.score.show({ x: this.x(curve), axis: this.axis, lines, bands: bands(curve, BLUE) });
  }

  /** The scores of the averaged model at the points of a curve. */
  private averageAt(curve: Curve): (number | null)[] | null {
    const { moment, scores } = this.run.averages;
    const values = scores[this.metric];
    if (!values) return null;
    const byMoment = new Map(moment.map((number, i) => [number, values[i] ?? null]));
    return curve.moment!.map((number) => byMoment.get(number!) ?? null);
  }

  private showTotals(chart: Chart, curve: Curve | undefined, show: (value: number | null) => string): void {
    if (!curve) return chart.show("No round is finished yet.");
    chart.show({ x: this.x(curve), axis: this.axis, lines: [{ label: "total", values: curve.sum!, colour: BLUE }], show });
  }

  private x(curve: Curve): (number | null)[] {
    return this.run.axis(this.axis, curve.round!, curve.time!);
  }
}

function bands(curve: Curve, colour: string) {
  return [
    { low: curve.min!, high: curve.max!, colour, alpha: 0.12, label: "lowest to highest node" },
    { low: curve.low!, high: curve.high!, colour, alpha: 0.25, label: "80 % of the nodes" },
  ];
}
