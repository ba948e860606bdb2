// Elements are made from text only: names of runs and plug-ins never become markup.

type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | undefined | ((event: Event) => void)>;

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, String(value));
  }
  append(element, ...children);
  return element;
}

export function append(element: Element, ...children: Child[]): void {
  for (const child of children) if (child) element.append(child);
}

export function replace(element: Element, ...children: Child[]): void {
  element.replaceChildren();
  append(element, ...children);
}

/** Set the text of an element, if it changed: screen readers announce changes. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

let count = 0;
export function labelled(label: string, control: HTMLElement): HTMLElement {
  control.id ||= `control-${++count}`;
  return h("span", { class: "field" }, h("label", { for: control.id }, label), control);
}

export function select(options: [string, string][], value: string, change: (value: string) => void): HTMLSelectElement {
  const element = h("select", { change: () => change(element.value) });
  setOptions(element, options, value);
  return element;
}

export function setOptions(element: HTMLSelectElement, options: [string, string][], value: string): void {
  const same = element.options.length === options.length && options.every(([v], i) => element.options[i]!.value === v);
  if (!same) replace(element, ...options.map(([v, text]) => h("option", { value: v }, text)));
  element.value = value;
}

export function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
