"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   v: [1, 2] = input
#   v_1: [1, 2] = input
#   reduce_scatter: [1, 2] = reduce_scatter(v, 0, 0, [0])
#   layer_norm: [1, 2] = layer_norm(v_1, gain, None, 1e-06)
#   mul_: [1, 2] = mul_.Tensor(v, 1.0)
#   return (reduce_scatter, layer_norm)

PASS = 'tests.mutants.multistream:WriteAfterReadUntracked'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'schedule': True,
    'overlap': True,
}
KIND = 'race'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"r'
    'ecipe":{"kind":"uniform","scale":1.0}},{"name":"v_1","shape":[1,2],"dtype":"float32","placements":[]'
    ',"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","ta'
    'rget":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"v","op":"p'
    'laceholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},'
    '{"name":"v_1","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"'
    'float32","alias":2}},{"name":"reduce_scatter","op":"call_function","target":"tensor_cast::reduce_sca'
    'tter","args":[{"node":"v"},0,{"rank_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[1,2],"'
    'stride":[2,1],"dtype":"float32","alias":3},"meta":{"cost_s":1e-06}},{"name":"layer_norm","op":"call_'
    'function","target":"tensor_cast::layer_norm","args":[{"node":"v_1"},{"node":"gain"},null,1e-06],"val'
    '":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":4},"meta":{"cost_s":1e-06}},{"name":"mul_"'
    ',"op":"call_function","target":"aten::mul_.Tensor","args":[{"node":"v"},1.0],"val":{"shape":[1,2],"s'
    'tride":[2,1],"dtype":"float32","alias":1},"meta":{"cost_s":1e-06}},{"name":"output","op":"output","t'
    'arget":"","args":[{"tuple":[{"node":"reduce_scatter"},{"node":"layer_norm"}]}]}]}],"ranks":[{"graph"'
    ':0,"constants":{"rank":0,"dp":[0]}},{"graph":0,"constants":{"rank":1,"dp":[1]}}],"seed":0,"labels":['
    '"layers=0","sbh","two-groups","reordered","extra-outputs","overlap","branches=2","binary","cast","fi'
    'lled","fused-norm","fused-reduce","in-place","index","marker","matmul","norm","reduce-scatter","spli'
    't","transpose","unary","view","timed"],"streams":{"compute":[0],"comm":[1],"sync_overhead_s":0.0,"de'
    'vice":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
