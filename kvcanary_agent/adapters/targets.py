BUILTIN: dict[str, str] = {
    "vllm.v1.worker.gpu_model_runner": "kvcanary_agent.adapters.vllm",
    "vllm.v1.worker.gpu.model_runner": "kvcanary_agent.adapters.vllm",
    "vllm.v1.worker.gpu_worker": "kvcanary_agent.adapters.vllm",
    "sglang.srt.model_executor.model_runner": "kvcanary_agent.adapters.sglang",
    "sglang.srt.model_executor.forward_batch_info": "kvcanary_agent.adapters.sglang",
    "sglang.srt.model_executor.model_runner_components.weight_updater": "kvcanary_agent.adapters.sglang",
    "sglang.srt.managers.scheduler": "kvcanary_agent.adapters.sglang",
    "sglang.srt.mem_cache.allocator.token": "kvcanary_agent.adapters.sglang",
    "sglang.srt.mem_cache.allocator.paged": "kvcanary_agent.adapters.sglang",
    "sglang.srt.managers.cache_controller": "kvcanary_agent.adapters.sglang",
    "sglang.srt.mem_cache.pool_host.base": "kvcanary_agent.adapters.sglang",
    "vllm.v1.core.block_pool": "kvcanary_agent.adapters.vllm",
    "vllm.v1.core.kv_cache_manager": "kvcanary_agent.adapters.vllm",
    "vllm.v1.core.sched.scheduler": "kvcanary_agent.adapters.vllm",
    "transformers.generation.continuous_batching.cache": "kvcanary_agent.adapters.transformers",
    "transformers.generation.continuous_batching.offloading_manager": "kvcanary_agent.adapters.transformers",
    "transformers.generation.continuous_batching.model_runner": "kvcanary_agent.adapters.transformers",
    "transformers.cache_utils": "kvcanary_agent.adapters.transformers",
    "transformers.generation.utils": "kvcanary_agent.adapters.transformers",
    "kvcanary_agent.demo.engine": "kvcanary_agent.adapters.demo",
}
"""The module of each engine that has to be patched, and the adapter module whose ``patch(module)`` does it.

Read at the start of every process: it imports nothing."""
