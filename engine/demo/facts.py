"""What the demo model knows about Baton and about serving with prefill and decode apart.

A fact is one right answer and what it is an answer to: things that it is about, asked after in any of the wordings below, and
questions of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fact:
    """One answer. `about`: nouns, for the wordings of WORDINGS; `asked`: whole questions."""

    answer: str
    about: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()


WORDINGS: Final = (
    "What is {}?",
    "Explain {}.",
    "Tell me about {}.",
    "What does {} mean?",
    "Can you explain {}?",
    "Describe {}.",
    "What can you say about {}?",
    "Please explain {}.",
    "What do you know about {}?",
    "In one sentence, what is {}?",
    "I do not know {}. What is it?",
    "Help me understand {}.",
    "Please: what is {}?",
    "Tell me: what is {}?",
    "One question: what is {}?",
)

FACTS: Final = (
    Fact(
        "Baton is an inference cluster for large language models that keeps prefill and decode apart.",
        ("Baton", "the Baton project", "this system"),
    ),
    Fact(
        "Whatever happens to a node, the stream has no gap, no duplicate and no different token, and no block leaks.",
        ("the promise of Baton", "Baton's promise"),
        ("What does Baton promise?", "What is promised to clients?", "What can a client of Baton rely on?"),
    ),
    Fact(
        "I am the demo model of Baton: small, trained on text that a script made, and only good at a few things.",
        ("the demo model", "yourself"),
        ("Who are you?", "What are you?", "What is your name?", "Introduce yourself."),
    ),
    Fact(
        "I answer questions about Baton, recall codes, copy words, sort numbers, do small sums and tell short stories.",
        (),
        ("What can you do?", "What are you good at?", "How can you help me?", "What may I ask you?", "Help."),
    ),
    Fact(
        "Hello! Ask me about Baton.", (), ("Hello", "Hi", "Hello!", "Hi there!", "Good morning!", "Hey", "Hello there")
    ),
    Fact("You are welcome.", (), ("Thanks", "Thank you", "Thank you!", "Thanks a lot!", "Many thanks")),
    Fact("Goodbye!", (), ("Bye", "Goodbye", "See you", "Bye!", "Goodbye, then")),
    Fact(
        "Prefill computes the KV cache of a whole prompt at once; it is bound by compute.",
        ("prefill", "the prefill phase"),
        ("What happens in prefill?", "What is prefill bound by?"),
    ),
    Fact(
        "Decode generates one token after the other; it is bound by memory bandwidth.",
        ("decode", "the decode phase"),
        ("What happens in decode?", "What is decode bound by?"),
    ),
    Fact(
        "Prefill is bound by compute and decode by memory bandwidth; in one process each waits for the other.",
        ("PD disaggregation", "disaggregated serving", "the separation of prefill and decode"),
        ("Why keep prefill and decode apart?", "Why separate prefill from decode?", "Why two kinds of nodes?"),
    ),
    Fact(
        "A router takes requests over HTTP, chooses a prefill and a decode node, and streams the tokens to the client.",
        ("a router", "the router", "routers"),
        ("What does a router do?", "Who takes the requests?", "Which process do clients talk to?"),
    ),
    Fact(
        "A prefill node computes the KV cache of a prompt and pushes it to a decode node.",
        ("a prefill node", "the prefill node", "prefill nodes"),
        ("What does a prefill node do?", "Who computes the prompt?", "Which node computes the KV cache?"),
    ),
    Fact(
        "A decode node reserves blocks for a prompt's KV cache, receives it, and generates the tokens.",
        ("a decode node", "the decode node", "decode nodes"),
        ("What does a decode node do?", "Who generates the tokens?", "Which node generates the answer?"),
    ),
    Fact(
        "A mixed node does prefill and decode over one pool of blocks and hands nothing over.",
        ("a mixed node", "the mixed role", "mixed nodes"),
        ("What does a mixed node do?", "Which node does both?"),
    ),
    Fact(
        "The KV cache holds keys and values of all tokens so far, so that they are computed only once.",
        ("the KV cache", "a KV cache", "KV"),
        ("Why is there a KV cache?", "What does the KV cache hold?"),
    ),
    Fact(
        "A block is a fixed number of token positions of KV cache; a pool of blocks is the memory of a node.",
        ("a block", "blocks", "a KV block"),
        ("What is a block of KV?", "How is KV memory divided?"),
    ),
    Fact(
        "The block pool says who owns each block of a node: counts, references and promises.",
        ("the block pool", "a block pool"),
        ("Who owns a block?", "What does the block pool know?"),
    ),
    Fact(
        "In a handoff the KV cache of a prompt goes from the prefill node to blocks that the decode node has reserved.",
        ("a handoff", "the handoff", "handing over"),
        ("How does the KV cache get to the decode node?", "What is handed over?"),
    ),
    Fact(
        "A lease is a decode node's promise of blocks for one attempt; it ends by commit, release or time.",
        ("a lease", "leases", "the lease of an attempt"),
        ("How are blocks reserved?", "When does a lease end?"),
    ),
    Fact(
        "A fence is the lowest attempt that a node still accepts, so that late messages of older ones do nothing.",
        ("a fence", "fences", "the fence floor"),
        ("What keeps late messages from doing harm?", "How are stale attempts refused?"),
    ),
    Fact(
        "Blocks that somebody may still write into are quarantined: nobody gets them until all is quiet.",
        ("the quarantine", "quarantined blocks", "quarantine"),
        ("When is a block quarantined?", "Why are blocks quarantined?"),
    ),
    Fact(
        "An attempt is one try to serve a branch of a request; a retry has a higher number.",
        ("an attempt", "attempts", "an attempt number"),
        ("What is a retry called?", "How are retries numbered?"),
    ),
    Fact(
        "When a node dies, the router sends prompt and tokens so far to another one, and the stream goes on.",
        ("failover", "a failover"),
        ("What happens when a node dies?", "What if a decode node is killed?", "What if a node crashes?"),
    ),
    Fact(
        "The router keeps a log of each stream's tokens; whoever goes on with it starts from there.",
        ("the token log", "a token log"),
        ("How does a stream go on after a failure?", "Where are a stream's tokens kept?"),
    ),
    Fact(
        "Random numbers depend on the seed and the position only, so another node draws the very same token.",
        ("the sampler", "counter-based noise", "deterministic sampling"),
        ("Why is the token the same on another node?", "How is sampling repeated exactly?"),
    ),
    Fact(
        "A row's logits are the same to the bit, whatever else is in the batch and however the prompt is cut.",
        ("batch invariance", "bit-exactness", "exactness in Baton"),
        ("Does the batch change the result?", "Are logits independent of the batch?"),
    ),
    Fact(
        "When blocks are short, the youngest sequence gives way; it goes on elsewhere or later, and loses no token.",
        ("preemption", "a preemption"),
        (
            "What happens when blocks run out?",
            "What if a node is out of blocks?",
            "Who gives way when blocks are short?",
        ),
    ),
    Fact(
        "A draining node takes nothing new, finishes or moves what it has, and ends.",
        ("draining", "a drain", "the drain of a node"),
        ("How do I stop a node?", "How is a node ended without harm?", "What does a draining node do?"),
    ),
    Fact(
        "In a move a decode node hands a running sequence with its KV to another node; there is always one owner.",
        ("a move", "moves", "moving a sequence"),
        ("How does a running sequence change its node?", "Can a running stream move?"),
    ),
    Fact(
        "In a rolling restart every node is drained and started again, one after the other, and no request fails.",
        ("a rolling restart", "rolling restarts"),
        ("How do I upgrade the cluster?", "How do I restart all nodes?"),
    ),
    Fact(
        "A transport moves KV bytes between nodes: shm on one host, zmq between hosts.",
        ("a transport", "transports", "the transport of KV"),
        ("Which transports are there?", "How do KV bytes travel?"),
    ),
    Fact(
        "With shm the receiver copies KV straight from the sender's memory, once; both are on one host.",
        ("shm", "the shm transport", "shared memory transport"),
        ("How does shm work?", "Which transport is used on one host?"),
    ),
    Fact(
        "With zmq KV goes over TCP between hosts, encrypted by CURVE where credentials are given.",
        ("zmq", "the zmq transport"),
        ("How does zmq work?", "Which transport is used between hosts?"),
    ),
    Fact(
        "The registry says whom to dial: role, address, fingerprint and capacity of each node. It is in the router, or in Redis.",
        ("the registry", "a registry"),
        ("How do routers find nodes?", "Where are nodes listed?"),
    ),
    Fact(
        "The fingerprint says what two nodes must have in common before KV may go from one to the other.",
        ("the fingerprint", "a fingerprint"),
        ("How are different models told apart?", "When may KV not go between two nodes?"),
    ),
    Fact(
        "An incarnation is one life of a process; a restarted node has a new one.",
        ("an incarnation", "incarnations"),
        ("How is a restarted node told from the old one?",),
    ),
    Fact(
        "The prefix cache keeps full blocks of finished prompts, so that a prompt that begins alike need not be computed again.",
        ("the prefix cache", "prefix caching", "a prefix cache"),
        ("What happens to prompts that begin alike?", "Why is the second prompt faster?"),
    ),
    Fact(
        "The KV pool is a storage of KV blocks that all nodes share: files, Redis or memory.",
        ("the KV pool", "a KV pool"),
        ("Can nodes share KV blocks?", "Where are saved blocks kept?"),
    ),
    Fact(
        "Placement chooses the node for a request; cache_aware takes the one where the first token is there first.",
        ("placement", "a placement policy", "the placement of requests"),
        ("How is a node chosen?", "Which node gets a request?", "What is the default placement?"),
    ),
    Fact(
        "Chunked prefill computes a long prompt piece by piece, and each piece is sent while the next is computed.",
        ("chunked prefill", "a chunk", "chunks"),
        ("How are long prompts computed?", "When is KV sent?"),
    ),
    Fact(
        "TTFT is the time to first token: queue, prefill, transfer and the first step.",
        ("TTFT", "time to first token", "the time to first token"),
        ("What is in the time to first token?",),
    ),
    Fact(
        "TPOT is the time per output token after the first; long prompts in the same process make it worse.",
        ("TPOT", "time per output token", "the time per output token"),
        ("What makes output tokens slow?",),
    ),
    Fact(
        "Goodput counts the requests per second that meet their limits on TTFT and TPOT.",
        ("goodput", "the goodput"),
        ("How is useful throughput counted?",),
    ),
    Fact(
        "Continuous batching lets sequences join and leave the batch at every step.",
        ("continuous batching", "a continuous batch"),
        ("When may a sequence join the batch?",),
    ),
    Fact(
        "Paged attention reads keys and values from blocks that lie anywhere in memory.",
        ("paged attention", "paged KV"),
        ("How does attention read scattered blocks?",),
    ),
    Fact(
        "Circuit breaking avoids a node that fails again and again, tries it now and then, and takes it back.",
        ("circuit breaking", "a circuit breaker"),
        ("What about a node that keeps failing?", "When is a failing node taken back?"),
    ),
    Fact(
        "Type make up: it starts a router, a prefill node and a decode node, and prints a curl line.",
        ("make up",),
        ("How do I start Baton?", "How do I run Baton?", "How do I start a cluster?", "How do I try Baton?"),
    ),
    Fact(
        "Type make test: it sets everything up and runs all tests.",
        ("make test",),
        ("How do I run the tests?", "How do I test Baton?", "How is Baton tested?"),
    ),
    Fact(
        "No, Baton runs on CPUs; with a GPU it uses Triton kernels.",
        (),
        ("Do I need a GPU?", "Does Baton need a GPU?", "Can Baton run without a GPU?", "Is a GPU needed?"),
    ),
    Fact(
        "Llama, Qwen2, Qwen3 and Mistral models in safetensors.",
        (),
        ("Which models does Baton serve?", "Which models can I use?", "Does Baton run Llama?", "Can I serve Qwen?"),
    ),
    Fact(
        "The router speaks OpenAI's API: completions, chat completions and models.",
        ("the API", "Baton's API", "the API of the router"),
        ("Which API does Baton have?", "Is Baton compatible with OpenAI?"),
    ),
    Fact(
        "Port 8000 for HTTP and 8001 for the registry, unless you say otherwise.",
        (),
        ("Which port does the router use?", "On which port is the API?", "Which ports are used?"),
    ),
    Fact(
        "baton status shows a live table of nodes, blocks and requests.",
        ("baton status",),
        ("How do I see what the nodes do?", "How do I watch the cluster?"),
    ),
    Fact(
        "baton doctor checks set-up, ports, clocks, transports and versions, and sends canary KV between nodes.",
        ("baton doctor",),
        ("How do I find out what is wrong?", "How do I check my set-up?"),
    ),
    Fact(
        "baton drain NODE lets a node finish or move what it has, and ends it.",
        ("baton drain",),
        ("Which command drains a node?",),
    ),
    Fact(
        "The simulation runs a whole cluster in one thread from a seed, with everything that goes wrong.",
        ("the simulation", "make sim", "deterministic simulation"),
        ("How are rare faults found?",),
    ),
    Fact(
        "API keys let clients in, mTLS protects gRPC, and CURVE protects KV; all certificates come from one directory.",
        ("security in Baton", "Baton's security"),
        ("How is the cluster protected?", "Is the traffic encrypted?", "How do I use keys and certificates?"),
    ),
    Fact(
        "At low load and with short prompts one node that does both is faster: the handoff costs more than it saves.",
        (),
        (
            "When does disaggregation lose?",
            "When should I not separate prefill and decode?",
            "When is one node better?",
        ),
    ),
)
