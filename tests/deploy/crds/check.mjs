// Reads custom resources, a JSON list, and prints what is wrong with each: null, or a text.
import { readFileSync } from "node:fs";

const PACKAGES = {
  "monitoring.coreos.com": "prometheus-operator",
  "keda.sh": "keda",
  "gateway.networking.k8s.io": "gateway-api",
};

async function wrong(object) {
  const [group, version] = object.apiVersion.split("/");
  const module = await import(`@kubernetes-models/${PACKAGES[group]}/${group}/${version}/${object.kind}`);
  try {
    new module[object.kind](object).validate();
    return null;
  } catch (error) {
    return String(error.message);
  }
}

const objects = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(await Promise.all(objects.map(wrong))));
