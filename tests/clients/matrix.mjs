// The openai npm client, unchanged, against a router: `node matrix.mjs BASE_URL MODEL`.
// Prints one JSON line per case: {"name", "ok", "why"}; exits 0 whatever the cases say.
import OpenAI, { APIUserAbortError, BadRequestError, NotFoundError } from "openai";
import assert from "node:assert/strict";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "a-key", maxRetries: 0, timeout: 100_000 });
const user = (content) => ({ role: "user", content });
const ask = { model, temperature: 0, max_tokens: 12 };
const weather = {
  name: "get_weather",
  description: "The weather of a city",
  parameters: {
    type: "object",
    properties: { city: { type: "string", maxLength: 12 } },
    required: ["city"],
    additionalProperties: false,
  },
};
const tools = [{ type: "function", function: weather }];
const person = {
  type: "object",
  properties: { name: { type: "string", maxLength: 10 }, age: { type: "integer", minimum: 0, maximum: 99 } },
  required: ["name", "age"],
  additionalProperties: false,
};

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

const textOf = (chunks) => chunks.map((chunk) => chunk.choices[0]?.delta?.content ?? "").join("");

const cases = {
  async "models are listed"() {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert.ok(names.includes(model));
  },
  async "a chat streams what it answers in one piece"() {
    const messages = [{ role: "system", content: "Be brief." }, user("Say hello to the harbour.")];
    const whole = await client.chat.completions.create({ ...ask, messages });
    const options = { stream: true, stream_options: { include_usage: true } };
    const chunks = await collect(await client.chat.completions.create({ ...ask, messages, ...options }));
    assert.equal(textOf(chunks), whole.choices[0].message.content);
    assert.deepEqual(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
  },
  async "three turns of a chat"() {
    const messages = [];
    for (const said of ["My name is Ada.", "What is my name?", "And yours?"]) {
      messages.push(user(said));
      const answer = await client.chat.completions.create({ ...ask, messages });
      messages.push(answer.choices[0].message);
    }
    assert.equal(messages.length, 6);
  },
  async "completions stream"() {
    const chunks = await collect(await client.completions.create({ ...ask, prompt: "One two three", stream: true }));
    assert.ok(chunks.map((chunk) => chunk.choices[0]?.text ?? "").join("").length > 0);
  },
  async "a function is called, whole and streamed"() {
    const request = {
      ...ask, max_tokens: 60, tools, tool_choice: "required", parallel_tool_calls: false,
      messages: [user("Weather in Oslo?")],
    };
    const whole = await client.chat.completions.create(request);
    const [call] = whole.choices[0].message.tool_calls;
    assert.equal(whole.choices[0].finish_reason, "tool_calls");
    assert.equal(call.function.name, "get_weather");
    assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
    const chunks = await collect(await client.chat.completions.create({ ...request, stream: true }));
    const pieces = chunks.flatMap((chunk) => chunk.choices[0]?.delta?.tool_calls ?? []);
    assert.equal(pieces[0].function.name, "get_weather");
    assert.equal(pieces.map((piece) => piece.function?.arguments ?? "").join(""), call.function.arguments);
    const result = { role: "tool", tool_call_id: call.id, content: "Rain" };
    const messages = [...request.messages, whole.choices[0].message, result];
    await client.chat.completions.create({ ...ask, tools, messages });
  },
  async "the stream helper gathers a call"() {
    const named = { type: "function", function: { name: "get_weather" } };
    const stream = client.chat.completions.stream({
      ...ask, max_tokens: 60, tools, tool_choice: named, messages: [user("Weather in Rome?")],
    });
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.tool_calls[0].function.name, "get_weather");
  },
  async "an answer keeps to a JSON schema"() {
    const response_format = { type: "json_schema", json_schema: { name: "person", strict: true, schema: person } };
    const answer = await client.chat.completions.create({
      ...ask, max_tokens: 80, response_format, messages: [user("A person, please.")],
    });
    const made = JSON.parse(answer.choices[0].message.content);
    assert.deepEqual(Object.keys(made).sort(), ["age", "name"]);
  },
  async "log probabilities"() {
    const answer = await client.chat.completions.create({
      ...ask, max_tokens: 3, logprobs: true, top_logprobs: 2, messages: [user("Hi")],
    });
    const { content } = answer.choices[0].logprobs;
    assert.equal(content.length, answer.usage.completion_tokens);
    assert.ok(content.every((one) => one.top_logprobs.length === 2 && one.logprob <= 0));
  },
  async "two answers to one question"() {
    const answer = await client.chat.completions.create({ ...ask, n: 2, messages: [user("Hi")] });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  },
  async "a response streams what it answers in one piece"() {
    const request = { model, input: "Say hello to the harbour.", temperature: 0, max_output_tokens: 12, store: false };
    const whole = await client.responses.create(request);
    let text = "";
    let last;
    for await (const event of await client.responses.create({ ...request, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
      last = event;
    }
    assert.equal(text, whole.output_text);
    assert.ok(["response.completed", "response.incomplete"].includes(last.type));
    assert.equal(last.response.usage.output_tokens, whole.usage.output_tokens);
  },
  async "a response calls a function"() {
    const answer = await client.responses.create({
      model, input: "Weather in Oslo?", temperature: 0, max_output_tokens: 60, store: false,
      tools: [{ type: "function", strict: true, ...weather }], tool_choice: "required",
    });
    const call = answer.output.find((item) => item.type === "function_call");
    assert.equal(call.name, "get_weather");
  },
  async "a response goes on from items"() {
    const input = [user("My name is Ada.")];
    const first = await client.responses.create({ model, input, temperature: 0, max_output_tokens: 8, store: false });
    const next = [...input, ...first.output, user("What is my name?")];
    const second = await client.responses.create({ model, input: next, temperature: 0, max_output_tokens: 8, store: false });
    assert.ok(second.output_text !== undefined);
  },
  async "an unknown model is not found"() {
    await assert.rejects(client.chat.completions.create({ ...ask, model: "none", messages: [user("Hi")] }), NotFoundError);
  },
  async "a bad parameter is named"() {
    await assert.rejects(client.chat.completions.create({ ...ask, temperature: -1, messages: [user("Hi")] }), (error) => {
      assert.ok(error instanceof BadRequestError);
      assert.match(error.message, /temperature/);
      return true;
    });
  },
  async "a stream is aborted"() {
    const stop = new AbortController();
    const request = { ...ask, max_tokens: 400, ignore_eos: true, stream: true, messages: [user("Count to a thousand.")] };
    const stream = await client.chat.completions.create(request, { signal: stop.signal });
    let count = 0;
    try {
      for await (const _ of stream) if (++count === 3) stop.abort();
    } catch (error) {
      assert.ok(error instanceof APIUserAbortError);
    }
    assert.ok(count < 300);
  },
};

for (const [name, run] of Object.entries(cases)) {
  let why = "";
  try {
    await run();
  } catch (error) {
    why = `${error?.stack ?? error}`.split("\n").slice(0, 6).join(" | ");
  }
  console.log(JSON.stringify({ name, ok: why === "", why }));
}
