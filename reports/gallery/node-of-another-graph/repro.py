"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [1, 2] = input
#   _internal_mark_region_begin: [1, 2] = _internal_mark_region_begin(v, 2)
#   return _internal_mark_region_begin

PASS = 'tests.mutants.foreign_local:StrayNode'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
}
KIND = 'malformed-graph'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"_internal_mark_region_begin","op":"'
    'call_function","target":"tensor_cast::_internal_mark_region_begin","args":[{"node":"v"},2],"val":{"s'
    'hape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"output","op":"output","target":"",'
    '"args":[{"node":"_internal_mark_region_begin"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"'
    'constants":{}}],"seed":0,"labels":["layers=4","bsh","bf16","reordered","extra-outputs","attention","'
    'bias","carried-residual","entry-norm","fused-residual","mask","mlp","over-tp","region","rms_norm","u'
    'nfused-residual","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
