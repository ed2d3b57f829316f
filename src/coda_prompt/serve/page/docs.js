// The API docs: Swagger UI with the OpenAPI document of the service.

const description = await (await fetch("/openapi.json")).json();
// The packaged Swagger UI refuses 3.1; it shows what this document uses of it.
window.SwaggerUIBundle({ spec: { ...description, openapi: "3.0.3" }, dom_id: "#swagger-ui", deepLinking: true });
