"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   partial: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(partial, 0, [0, 1])
#   return all_reduce

PASS = 'tests.mutants.foreign_local:CallerNotWaitedFor'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
    'inputs': 'stream0',
}
KIND = 'race'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"partial","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"u'
    'niform","scale":1.0}}],"graphs":[{"nodes":[{"name":"partial","op":"placeholder","target":"","args":['
    '],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"all_reduce","op":"call_'
    'function","target":"tensor_cast::all_reduce","args":[{"node":"partial"},{"rank_constant":"rank"},{"r'
    'ank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"outp'
    'ut","op":"output","target":"","args":[{"node":"all_reduce"}]}]}],"ranks":[{"graph":0,"constants":{"r'
    'ank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=1","bs'
    'h","two-groups","reordered","extra-outputs","fused-reduce","fused-residual","mlp","over-dp","over-tp'
    '","region","rms_norm"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
