// A part of the page that the service answers by itself, later than the rest.

import { getJson } from "../api.js";
import { byId, setText } from "../dom.js";

const RETRY_MS = 10_000;

export class Part {
  /** `data` stands in until there is an answer; `note` is the element that tells of a failure. */
  constructor(path, data, note, onChange) {
    this.path = path;
    this.data = data;
    this.note = note;
    this.onChange = onChange;
    this.reason = null; // what the data follow from
    this.isAsked = false;
    this.notBefore = 0;
  }

  /** Without a change of the reason it is not asked for again, unless the answer was not whole. */
  async follow(reason, isWhole = () => true) {
    if (this.isAsked || this.reason === reason || Date.now() < this.notBefore) return;
    this.isAsked = true;
    try {
      this.data = await getJson(this.path);
      if (isWhole(this.data)) this.reason = reason;
      setText(byId(this.note), "");
      this.onChange();
    } catch (error) {
      console.info("no answer:", error);
      this.notBefore = Date.now() + RETRY_MS;
      setText(byId(this.note), "The service did not answer this part. It will be asked again.");
    }
    this.isAsked = false;
  }
}
