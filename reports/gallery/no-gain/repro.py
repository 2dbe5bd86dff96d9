"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   sin: [1, 2] = sin(x)
#   return sin

PASS = 'tests.mutants.multistream:NoGuard'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'schedule': True,
    'overlap': True,
}
KIND = 'no-gain'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"sin","op":"call_function","target":'
    '"aten::sin","args":[{"node":"x"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1},"'
    'meta":{"cost_s":1e-06}},{"name":"output","op":"output","target":"","args":[{"node":"sin"}]}]}],"rank'
    's":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels":["layers=0","bsh","bf16'
    '","two-groups","reordered","extra-outputs","overlap","branches=3","all-reduce","binary","cast","fuse'
    'd-norm","fused-reduce","index","matmul","norm","reduce-scatter","split","unary","view","timed"],"str'
    'eams":{"compute":[0],"comm":[1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
