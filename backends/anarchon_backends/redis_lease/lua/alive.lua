-- In a cluster, the part of a heartbeat that is about no job: the instance lives (S26, S32).

local known, twins = say_alive(batch.instance, batch.leaving)
return reply({ known = known, twins = twins })
