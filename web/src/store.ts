import type { Averages, CurvePart, Edges, NodeStates, Numbers, RunChanges, RunInfo } from "./api";

export type Curve = Record<string, Numbers>;
export type Axis = "rounds" | "time" | "bytes";

export interface NodeValues {
  round: number;
  time: number;
  loss: number | null;
  state: number;
  scores: Record<string, number | null>;
}

export const RUNNING = 0;
export const ENDED = 1;
export const FAILED = 2;

/** A table by names that others chose: without a prototype, `__proto__` and `constructor` are names like all others. */
export function byName<T>(entries: Record<string, T> = {}): Record<string, T> {
  return Object.assign(Object.create(null) as Record<string, T>, entries);
}

function noAverages(): Averages {
  return { moment: [], round: [], time: [], consensus: [], scores: byName() };
}

/** The state of all nodes at one time: now, or a time of the past. */
export class Snapshot {
  nodes = new Map<number, NodeValues>();
  sentTo = new Map<number, number[]>();
  /** Edges that the server did not send, because they are too many. */
  leftOut = 0;

  apply(states?: NodeStates, edges?: Edges): void {
    if (states) {
      const metrics = Object.entries(states.scores);
      states.id.forEach((id, i) => {
        const scores = byName<number | null>();
        for (const [name, values] of metrics) scores[name] = values[i]!;
        const [round, time, loss, state] = [states.round[i]!, states.time[i]!, states.loss[i]!, states.state[i]!];
        this.nodes.set(id, { round, time, loss, state, scores });
      });
    }
    if (edges) {
      let start = 0;
      edges.id.forEach((id, i) => {
        this.sentTo.set(id, edges.to.slice(start, start + edges.count[i]!));
        start += edges.count[i]!;
      });
      this.leftOut = edges.left_out;
    }
  }

  get latestRound(): number {
    let latest = 0;
    for (const node of this.nodes.values()) latest = Math.max(latest, node.round);
    return latest;
  }
}

function merge(curve: Curve | undefined, part: CurvePart): Curve {
  const merged: Curve = curve ?? byName();
  for (const [name, values] of Object.entries(part)) {
    if (name === "rows" || name === "size") continue;
    const column = (merged[name] ??= []);
    column.length = part.size;
    part.rows.forEach((row, i) => (column[row] = (values as Numbers)[i]!));
  }
  return merged;
}

/** Everything that the page has of a run. */
export class RunData {
  info!: RunInfo;
  duration = 0;
  nodeCount = 0;
  damaged = 0;
  metric: string | null = null;
  hasEdges = false;
  hasSpans = false;
  curves = byName<Curve>();
  training = byName<Curve>();
  averages = noAverages();
  now = new Snapshot();
  /** How often everything was read anew: what was read before is outdated. */
  resets = 0;

  apply(changes: RunChanges): void {
    if (changes.reset) {
      this.resets++;
      this.curves = byName();
      this.training = byName();
      this.averages = noAverages();
      this.now = new Snapshot();
    }
    this.info = changes.info;
    this.duration = changes.duration;
    this.nodeCount = changes.nodes;
    this.damaged = changes.damaged;
    this.hasEdges = changes.has_edges;
    this.hasSpans = changes.has_spans;
    this.metric = changes.metric;
    for (const [name, part] of Object.entries(changes.curves)) this.curves[name] = merge(this.curves[name], part);
    for (const [name, part] of Object.entries(changes.training ?? {})) {
      this.training[name] = merge(this.training[name], part);
    }
    if (changes.averages) this.averages = { ...changes.averages, scores: byName(changes.averages.scores) };
    this.now.apply(changes.state, changes.edges);
  }

  get isLive(): boolean {
    return this.info.status === "running" || this.info.status === "unfinished";
  }

  /** Bytes that all nodes had sent at a time. */
  bytesAt(time: number): number | null {
    const curve = this.training.bytes;
    if (!curve) return null;
    const at = lastAtMost(curve.time!, time);
    return at < 0 ? 0 : curve.sum![at]!;
  }

  /** The horizontal values of points with these rounds and times. */
  axis(axis: Axis, rounds: Numbers, times: Numbers): Numbers {
    if (axis === "rounds") return rounds;
    return axis === "time" ? times : times.map((time) => this.bytesAt(time ?? 0));
  }

  /** The value on an axis at a time of the run. */
  axisAt(axis: Axis, time: number): number | null {
    if (axis === "time") return time;
    if (axis === "bytes") return this.bytesAt(time);
    const curve = this.training.bytes;
    if (!curve) return null;
    const at = lastAtMost(curve.time!, time);
    return at < 0 ? 0 : curve.round![at]!;
  }

  /** The times at which the slider of a replay stops: when each round was finished. */
  get stops(): number[] {
    const times = (this.training.bytes?.time ?? []) as number[];
    const last = times[times.length - 1];
    return last !== undefined && last < this.duration ? [...times, this.duration] : times;
  }
}

function lastAtMost(values: Numbers, limit: number): number {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((values[middle] ?? 0) <= limit) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
