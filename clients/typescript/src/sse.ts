// Server-sent events out of bytes that are cut anywhere. Knows the framing, not what the data means.

/** One event. */
export interface ServerEvent {
  data: string;
  event: string;
  /** The last id that was sent, which a resumed stream begins behind. */
  id: string;
}

/** Reads by the rules of the HTML standard: lines end with LF, CR or CR LF; comments say nothing. */
export class EventParser {
  #decoder = new TextDecoder("utf-8");
  #rest = "";
  /** Characters of the rest that are known to hold no end of a line: a long line is searched once. */
  #scanned = 0;
  #data: string[] = [];
  #event = "";
  #id = "";

  /** Return the events that are complete with these bytes. */
  feed(bytes: Uint8Array): ServerEvent[] {
    const text = this.#rest + this.#decoder.decode(bytes, { stream: true });
    const events: ServerEvent[] = [];
    const ends = /\r\n|\r|\n/g;
    ends.lastIndex = this.#scanned;
    let start = 0;
    for (let end = ends.exec(text); end !== null; end = ends.exec(text)) {
      if (end[0] === "\r" && ends.lastIndex === text.length) break; // a LF may follow: it belongs to this end
      const event = this.#line(text.slice(start, end.index));
      if (event !== undefined) events.push(event);
      start = ends.lastIndex;
    }
    this.#rest = text.slice(start);
    this.#scanned = this.#rest.length - (this.#rest.endsWith("\r") ? 1 : 0);
    return events;
  }

  #line(line: string): ServerEvent | undefined {
    if (line === "") return this.#dispatch();
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
    else if (name === "id" && !value.includes("\0")) this.#id = value;
    return undefined;
  }

  #dispatch(): ServerEvent | undefined {
    const [data, event] = [this.#data, this.#event];
    [this.#data, this.#event] = [[], ""];
    return data.length > 0 ? { data: data.join("\n"), event, id: this.#id } : undefined;
  }
}
