export function bytes(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit++;
  }
  return `${unit === 0 ? value.toFixed(0) : value.toPrecision(3)} ${units[unit]}`;
}

export function seconds(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value < 120) return `${value < 10 ? value.toFixed(2) : value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return `${minutes} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function score(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  return Math.abs(value) >= 1000 ? value.toExponential(2) : value.toFixed(Math.abs(value) >= 10 ? 2 : 4);
}

export function count(value: number | null | undefined): string {
  return value == null ? "–" : Math.round(value).toLocaleString("en");
}

export function moment(secondsSince1970: number): string {
  if (!secondsSince1970) return "–";
  const pad = (n: number) => String(n).padStart(2, "0");
  const d = new Date(secondsSince1970 * 1000);
  return `${d.getFullYear()}-${pad(d.getMonth() + 1)}-${pad(d.getDate())} ${pad(d.getHours())}:${pad(d.getMinutes())}`;
}
