"""Values for the chart that tests install: each way of setting it up, wrong ones, and any number drawn at random."""

from __future__ import annotations

import random
from typing import Any, Final

Values = dict[str, Any]

TINY: Final[Values] = {"model": {"random": "llama-tiny"}}
CLAIM: Final[Values] = {"model": {"volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}}}
TLS: Final[Values] = {"tls": {"certManager": {"enabled": True, "issuerRef": {"name": "baton"}}}}
MIXED_ONLY: Final[Values] = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "mixed": {"replicas": 2}}


def together(*parts: Values) -> Values:
    """All of them, what comes later wins."""
    found: Values = {}
    for part in parts:
        for key, value in part.items():
            old = found.get(key)
            found[key] = together(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return found


# What each switch of the chart can be set to; every test may count on a model.
SWITCHES: Final[dict[str, Values]] = {
    "claim": together(CLAIM, {"model": {"path": "llama/3b/"}}),
    "tls": TLS,
    "own tls": {"tls": {"existingSecret": "certificates"}},
    "keys": {"apiKeys": {"existingSecret": "api-keys", "key": "keys.txt"}},
    "mixed": {"mixed": {"replicas": 1}},
    "no prefill": {"prefill": {"replicas": 0}},
    "autoscaling": {"router": {"autoscaling": {"enabled": True}, "config": {"workers": 2}}},
    "ingress": {"router": {"ingress": {"enabled": True, "host": "llm.example.com", "tlsSecret": "llm-tls"}}},
    "ingress of a zone": {"router": {"ingress": {"enabled": True, "host": "*.example.com", "tlsSecret": "zone-tls"}}},
    "monitor": {"podMonitor": {"enabled": True, "keySecret": {"name": "scrape-key"}, "labels": {"release": "prom"}}},
    "password": {"redis": {"passwordSecret": {"name": "redis-password"}}},
    "own redis": {"redis": {"url": "rediss://cache.example.com:6380/2"}},
    "own redis, port left out": {"redis": {"url": "redis://cache.example.com/2"}},
    "redis of a secret": {"redis": {"urlSecret": {"name": "redis-url", "port": 7000}}},
    "no policies": {"networkPolicy": {"enabled": False}},
    "no egress": {"networkPolicy": {"egress": False}},
    "clients": {"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "chat"}}}]}},
    "clients alone": {
        "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "chat"}}}], "scrapers": None}
    },
    "no scrapers": {"networkPolicy": {"scrapers": []}},
    "no budgets": {role: {"podDisruptionBudget": {"enabled": False}} for role in ("router", "prefill", "decode")},
    "no account": {"serviceAccount": {"create": False, "name": "mine"}},
    "slow drain": {"router": {"drainTimeoutSeconds": 600, "preStopSeconds": 0}, "decode": {"drainTimeoutSeconds": 600}},
    "gpu": {
        "decode": {
            "resources": {"limits": {"nvidia.com/gpu": 1, "rdma/hca_shared_devices_a": 1, "memory": "64Gi"}},
            "shmSize": "2Gi",
            "runtimeClassName": "nvidia",
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "nodeSelector": {"nvidia.com/gpu.product": "H100"},
        }
    },
    "knobs": {
        "config": {
            "block_size": 32,
            "local_prefill": True,
            "max_num_batched_tokens": 1048576,
            "kv_pool": "redis://kv:6379/0",
        },
        "decode": {"config": {"local_prefill": False, "num_blocks": 20000, "new_token_ratio_min": 0.05, "threads": 3}},
        "router": {
            "config": {"request_timeout_s": 3600, "preempt_retry_exclude_decode": False, "placement_seed": None}
        },
        "networkPolicy": {"extraEgress": [{"ports": [{"protocol": "TCP", "port": 6379}]}]},
    },
    "a large seed": {"router": {"config": {"placement_seed": (1 << 53) - 1}}},
    "nixl": {
        "prefill": {"config": {"transport": "nixl"}, "resources": {"limits": {"rdma/hca_shared_devices_a": 1}}},
        "decode": {"config": {"transport": "nixl"}, "resources": {"limits": {"rdma/hca_shared_devices_a": 1}}},
    },
    "extras": {
        role: {
            "extraEnv": [{"name": "BATON_KV_POOL", "valueFrom": {"secretKeyRef": {"name": "kv", "key": "url"}}}],
            "extraVolumes": [{"name": "more", "configMap": {"name": "more"}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            "podAnnotations": {"example.com/team": "llm"},
            "priorityClassName": "high",
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
            ],
        }
        for role in ("router", "prefill", "decode")
    },
    "own variables": {
        "decode": {
            "extraEnv": [
                {"name": "BATON_THREADS", "value": "5"},
                {"name": "TRITON_CACHE_DIR", "value": "/cache"},
                {"name": "TRITON_CACHE_DIR", "value": "/tmp/mine"},
            ]
        },
        "router": {"extraEnv": [{"name": "BATON_HOST", "value": "::"}]},
    },
    "no CPU": {
        "prefill": {"resources": {"requests": {"cpu": 0}, "limits": {"cpu": "3"}}},
        "decode": {"resources": {"requests": {"cpu": "0m"}}},
    },
    "image": {"image": {"repository": "example.com/a/baton", "tag": "7.1_cuda", "pullSecrets": [{"name": "pull"}]}},
    "digest": {"image": {"tag": f"1.0@sha256:{'a' * 64}"}},
    "tag that is cut": {"image": {"tag": f"{'a' * 62}-b_"}},
    "quotes": {"model": {"servedName": 'it\'s "mine" \\ $HOME'}},
    "a number": {"nameOverride": "7", "fullnameOverride": "llm", "serviceAccount": {"name": "42"}},
    "names": {"nameOverride": "llm", "fullnameOverride": "a-name-that-is-longer-than-forty-characters-are"},
}
# Names of releases, where a case is about these.
RELEASES: Final = {"long names": "r" * 53, "a number": "123", "release with a dot": "llm.v2", "release of digits": "7"}
EXCLUDING: Final = (
    {"tls", "nixl"},
    {"own tls", "nixl"},
    {"own redis", "own redis, port left out", "redis of a secret", "password"},
    {"tls", "own tls"},
    {"extras", "own variables"},
)
# Wrong values, and what of Helm's answer says which one it is.
WRONG: Final[dict[str, tuple[Values, str]]] = {
    "no model": ({}, "model: say in model.volume where it is"),
    "two models": (together(TINY, CLAIM), "model: volume and random exclude each other"),
    "two volumes": ({"model": {"volume": {"hostPath": {"path": "/m"}, "emptyDir": {}}}}, "/model/volume"),
    "misspelt knob": (together(TINY, {"decode": {"config": {"blok_size": 32}}}), "blok_size"),
    "a router's knob on a node": (together(TINY, {"decode": {"config": {"max_queue": 5}}}), "max_queue"),
    "a knob of the chart's": (together(TINY, {"config": {"grpc_port": 7000}}), "grpc_port"),
    "knob out of bounds": (together(TINY, {"config": {"block_size": 0}}), "/config/block_size"),
    "a seed that would be rounded": (
        together(TINY, {"router": {"config": {"placement_seed": (1 << 53) + 1}}}),
        "/router/config/placement_seed",
    ),
    "knob of another type": (together(TINY, {"router": {"config": {"max_queue": "many"}}}), "/router/config/max_queue"),
    "no such choice": (together(TINY, {"config": {"transport": "carrier-pigeon"}}), "/config/transport"),
    "misspelt value": (together(TINY, {"decode": {"replica": 3}}), "replica"),
    "no router": (together(TINY, {"router": {"replicas": 0}}), "/router/replicas"),
    "no node": (together(TINY, {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}), "nobody computes"),
    "only prefill": (together(TINY, {"decode": {"replicas": 0}}), "nobody generates"),
    "no issuer": (together(TINY, {"tls": {"certManager": {"enabled": True}}}), "issuerRef.name"),
    "nixl in the clear": (together(TINY, TLS, SWITCHES["nixl"]), "nixl encrypts nothing"),
    "two redis": (together(TINY, SWITCHES["own redis"], SWITCHES["redis of a secret"]), "exclude each other"),
    "no redis URL": (together(TINY, {"redis": {"url": "cache:6379"}}), "/redis/url"),
    "ingress for nobody": (together(TINY, {"router": {"ingress": {"enabled": True}}}), "router.ingress: host"),
    "release with a dot": (TINY, "llm.v2-baton: Services take names of small letters"),
    "release of digits": (TINY, "fullnameOverride"),
    "name with a capital": (together(TINY, {"fullnameOverride": "LLM"}), "LLM: Services take names of small letters"),
    "name that is no label": (
        together(TINY, {"fullnameOverride": "llm", "nameOverride": "our LLM"}),
        "nameOverride: our LLM",
    ),
    "no CPU to scale by": (
        together(TINY, SWITCHES["autoscaling"], {"router": {"resources": {"requests": {"cpu": None}}}}),
        "router.autoscaling",
    ),
}


def drawn(rng: random.Random) -> list[str]:
    """Switches that go together."""
    chosen = [name for name in SWITCHES if rng.random() < 0.4]
    for group in EXCLUDING:
        both = [name for name in chosen if name in group]
        for name in both[1:]:
            chosen.remove(name)
    return chosen


def values_of(switches: list[str]) -> Values:
    """The values, with a model."""
    model = {} if "claim" in switches else TINY
    return together(model, *(SWITCHES[name] for name in switches))
