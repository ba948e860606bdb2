// Palettes that colour-blind people can tell apart: Okabe and Ito for kinds, viridis for amounts.

export const KINDS = ["#1b84c7", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8f7ee7", "#999999"];

export type Colour = [number, number, number];

const VIRIDIS: Colour[] = [
  [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141],
  [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37],
];
const LAG: Colour[] = [
  [171, 203, 224], [232, 204, 120], [230, 159, 0], [213, 94, 0], [140, 30, 0],
];
export const STATE_COLOURS: Colour[] = [[86, 180, 233], [0, 158, 115], [213, 94, 0]];
export const UNKNOWN: Colour = [150, 156, 163];

function along(stops: Colour[], share: number): Colour {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const part = place - low;
  return stops[low]!.map((value, i) => Math.round(value + part * (stops[low + 1]![i]! - value))) as Colour;
}

export const viridis = (share: number): Colour => along(VIRIDIS, share);
export const lag = (share: number): Colour => along(LAG, share);
export const rgb = (colour: Colour, alpha = 1): string => `rgba(${colour.join(",")},${alpha})`;

export function withAlpha(hex: string, alpha: number): string {
  const n = parseInt(hex.slice(1), 16);
  return rgb([n >> 16, (n >> 8) & 255, n & 255], alpha);
}
