import { setText } from "./dom";

/** What is shown in the main part of the page. */
export interface View {
  title: string;
  close(): void;
  /** The theme changed. */
  recolour?(): void;
}

/** The address of a view: its name and parts, such as the id of a run. */
export function link(name: string, ...parts: string[]): string {
  return `#/${[name, ...parts].map(encodeURIComponent).join("/")}`;
}

/** The parts of an address; none if it is malformed. */
export function parts(hash: string): string[] {
  try {
    return hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return [];
  }
}

export function setConnected(connected: boolean): void {
  setText(document.getElementById("connection")!, connected ? "" : "Not connected: is shoal serve still running?");
}
