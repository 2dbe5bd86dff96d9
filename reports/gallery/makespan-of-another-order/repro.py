"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   x_1: [1, 2] = input
#   gain: [2] = input
#   x_scale: [1, 1] = input
#   wq: [2, 2] = input
#   add_rms_norm2 = add_rms_norm2(x_1, x_1, gain, 1e-06)
#   getitem: [1, 2] = add_rms_norm2[0]
#   fp8_linear_all_reduce: [1, 2] = fp8_linear_all_reduce(x_1, wq, x_scale, gain, None, float32, 0, [0, 1])
#   all_reduce: [1, 2] = all_reduce(x, 0, [0, 1])
#   return (getitem, fp8_linear_all_reduce, all_reduce)

PASS = 'tests.mutants.multistream:OldMakespanDeclared'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'schedule': True,
    'overlap': True,
}
KIND = 'wrong-schedule'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"rec'
    'ipe":{"kind":"uniform","scale":1.0}},{"name":"x_1","shape":[1,2],"dtype":"float32","placements":[],"'
    'recipe":{"kind":"uniform","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[]'
    ',"recipe":{"kind":"uniform","scale":1.0}},{"name":"x_scale","shape":[1,1],"dtype":"float32","placeme'
    'nts":[],"recipe":{"kind":"uniform","scale":1.0}},{"name":"wq","shape":[2,2],"dtype":"float32","place'
    'ments":[],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholde'
    'r","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"'
    'x_1","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32",'
    '"alias":1}},{"name":"gain","op":"placeholder","target":"","args":[],"val":{"shape":[2],"stride":[1],'
    '"dtype":"float32","alias":2}},{"name":"x_scale","op":"placeholder","target":"","args":[],"val":{"sha'
    'pe":[1,1],"stride":[1,1],"dtype":"float32","alias":3}},{"name":"wq","op":"placeholder","target":"","'
    'args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":4}},{"name":"add_rms_norm2","'
    'op":"call_function","target":"tensor_cast::add_rms_norm2","args":[{"node":"x_1"},{"node":"x_1"},{"no'
    'de":"gain"},1e-06],"val":{"tuple":[{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":5},{"shap'
    'e":[1,2],"stride":[2,1],"dtype":"float32","alias":6}]},"meta":{"cost_s":1e-06}},{"name":"getitem","o'
    'p":"call_function","target":"python::getitem","args":[{"node":"add_rms_norm2"},0],"val":{"shape":[1,'
    '2],"stride":[2,1],"dtype":"float32","alias":5},"meta":{"cost_s":1e-06}},{"name":"fp8_linear_all_redu'
    'ce","op":"call_function","target":"tensor_cast::fp8_linear_all_reduce","args":[{"node":"x_1"},{"node'
    '":"wq"},{"node":"x_scale"},{"node":"gain"},null,{"dtype":"float32"},{"rank_constant":"rank"},{"rank_'
    'constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":7},"meta":{"cost_s":1'
    'e-06}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":'
    '"x"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"f'
    'loat32","alias":8},"meta":{"cost_s":1e-05}},{"name":"output","op":"output","target":"","args":[{"tup'
    'le":[{"node":"getitem"},{"node":"fp8_linear_all_reduce"},{"node":"all_reduce"}]}]}]}],"ranks":[{"gra'
    'ph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"la'
    'bels":["layers=0","flat","bf16","uneven","extra-outputs","overlap","branches=2","all-reduce","all-to'
    '-all","cast","fused-norm","fused-reduce","index","marker","matmul","norm","quantised","transpose","u'
    'nary","write","timed","rank-dependent-costs"],"streams":{"compute":[0],"comm":[1],"sync_overhead_s":'
    '0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
